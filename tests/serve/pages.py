"""Reads pages of the documentation as a newcomer does: runs every block, in order.

    pages.py PVMM PAGE...

A page is a file of the built site, or its source. In a `console` block a line with `$` is a command,
and the lines after it are its output; a command without such lines may print anything. The output of
a `python` block is in the `text` block after it. All commands of a page share one shell.
"""

import html
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

# The longest time of one command; the first may build a template.
PATIENCE = 900
MARK = "--- done"


def blocks(page):
    """The kind and the lines of each block."""
    with open(page, encoding="utf-8") as file:
        text = file.read()
    if page.endswith(".html"):
        found = re.findall(r'<code class="language-(\w+)[^"]*">(.*?)</code>', text, re.S)
        found = [(kind, html.unescape(re.sub(r"<[^>]*>", "", body))) for kind, body in found]
    else:
        found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
    return [(kind, body.splitlines()) for kind, body in found]


def commands(lines):
    """The commands of a console block, each with its output."""
    found = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


class Terminal:
    """A shell in an empty folder."""

    def __init__(self, folder):
        self.folder, self.server = folder, None
        self.shell = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, text=True
        )

    def run(self, line, expected):
        timer = threading.Timer(PATIENCE, self.shell.kill)
        timer.start()
        self.shell.stdin.write(f"{{ {line}\n}} < /dev/null\necho '{MARK}' $?\n")
        self.shell.stdin.flush()
        said = []
        while not (said and said[-1].startswith(MARK)):
            answer = self.shell.stdout.readline()
            assert answer, (line, said, "the shell has ended")
            said.append(answer.rstrip("\n"))
        timer.cancel()
        code = said.pop().split()[-1]
        assert code == "0", (line, code, said)
        assert not expected or said == expected, (line, said)

    def serve(self, line):
        """Starts the server of a page, which a reader has in another terminal."""
        log = os.path.join(self.folder, "serve.log")
        with open(log, "w", encoding="utf-8") as file:
            self.server = subprocess.Popen(line.split(), stdin=subprocess.DEVNULL, stderr=file)
        end = time.monotonic() + PATIENCE
        while "listening on" not in open(log, encoding="utf-8").read():
            assert self.server.poll() is None and time.monotonic() < end, open(log).read()
            time.sleep(0.2)

    def end(self):
        self.shell.stdin.close()
        assert self.shell.wait(timeout=60) == 0
        if self.server:
            self.server.terminate()
            assert self.server.wait(timeout=120) == 0


def installed(line):
    """Whether the packages that a page installs are those that are here: tests have no network."""
    for word in line.removeprefix("pip install ").split():
        name, version = word.split("==")
        assert importlib.metadata.version(name) == version, word


def read(page):
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(folder)
        found = blocks(page)
        for number, (kind, lines) in enumerate(found):
            for line, expected in commands(lines) if kind == "console" else []:
                if line.startswith("pip install "):
                    installed(line)
                elif line.startswith("pvmm serve"):
                    terminal.serve(line)
                else:
                    terminal.run(line, expected)
                count += 1
            if kind == "python":
                output = found[number + 1]
                assert output[0] == "text", "a python block needs its output"
                with open(os.path.join(folder, "program.py"), "w", encoding="utf-8") as file:
                    file.write("\n".join(lines))
                terminal.run("python3 program.py", output[1])
                count += 1
        terminal.end()
    assert count > 0
    print(f"{count} commands of {os.path.basename(page)}: ok", flush=True)


def main():
    pvmm, *pages = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(os.path.abspath(pvmm), os.path.join(folder, "pvmm"))
        os.environ["PATH"] = folder + ":" + os.environ["PATH"]
        for page in pages:
            read(page)


if __name__ == "__main__":
    main()
