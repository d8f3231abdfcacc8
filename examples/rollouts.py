"""Rollouts for reinforcement learning: one warm task image, many forks of it.

This uses `harbor-firecracker` as it is published, over a service of pvmm:
`PANDASTACK_API` and `PANDASTACK_API_KEY` name it.
"""

from harbor_firecracker import fork_rollouts

ROLLOUTS = 20  # two calls of the service, which forks sixteen at a time


def setup(base) -> None:
    base.exec("mkdir -p /root/task && echo 41 > /root/task/number", check=True)


if __name__ == "__main__":
    pool, rollouts = fork_rollouts(ROLLOUTS, setup=setup, ttl_seconds=600)
    try:
        add = "n=$(( $(cat /root/task/number) + {} )); echo $n > /root/task/number; echo $n"
        told = [r.sandbox.exec(add.format(r.index)).stdout for r in rollouts]
        base = pool.base.exec("cat /root/task/number").stdout
    finally:
        pool.close()
    print(told)
    assert told == [f"{41 + index}\n" for index in range(ROLLOUTS)], told
    assert base == "41\n", base
    assert len({r.sandbox.id for r in rollouts}) == ROLLOUTS
