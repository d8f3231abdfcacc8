# Runs in the guest: streams over vsock and TCP, and a disk read and written past the page cache.
# Prints one JSON object, MB/s each; the guest's clock is kvm-clock for every contender.
import json, mmap, os, random, socket, sys, time

MIB = 1 << 20
size = int(sys.argv[1]) * MIB
gateway = sys.argv[2]
result = {}


def measure(name, count, act):
    begun = time.perf_counter()
    act()
    result[name] = count / (time.perf_counter() - begun) / 1e6


def disk():
    block, page = mmap.mmap(-1, MIB), mmap.mmap(-1, 4096)
    block.write(os.urandom(MIB))
    page.write(os.urandom(4096))
    fd = os.open("/dev/vdb", os.O_RDWR | os.O_DIRECT)
    places = [random.randrange(size // 4096) * 4096 for _ in range(size // MIB * 16)]

    def over(call, buffer, offsets):
        def act():
            for offset in offsets:
                assert call(fd, [buffer], offset) == len(buffer)

        return act

    steps = range(0, size, MIB)
    measure("block: sequential write", size, over(os.pwritev, block, steps))
    measure("block: sequential read", size, over(os.preadv, block, steps))
    measure("block: random 4K write", len(places) * 4096, over(os.pwritev, page, places))
    measure("block: random 4K read", len(places) * 4096, over(os.preadv, page, places))


def stream(name, family, address):
    peer = socket.socket(family, socket.SOCK_STREAM)
    peer.connect(address)
    data = os.urandom(MIB)

    def out():
        for _ in range(size // MIB):
            peer.sendall(data)
        assert peer.recv(1) == b"k"

    def into():
        peer.sendall(b"g")
        left, buffer = size, bytearray(1 << 18)
        while left:
            got = peer.recv_into(buffer)
            assert got
            left -= got

    measure(name + ": guest to host", size, out)
    measure(name + ": host to guest", size, into)
    peer.sendall(b"e")


disk()
stream("vsock", socket.AF_VSOCK, (2, 5005))
if gateway:
    stream("TCP over tap", socket.AF_INET, (gateway, 5006))
print(json.dumps(result))
