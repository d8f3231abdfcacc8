"""The repository that the article calls `https://example.com/repo`, put into a sandbox.

The article's address stands for any repository. Here git is told to find it on the sandbox's own
disk, so that the example needs no network.
"""

SETUP = """
set -e
mkdir -p /srv/repo && cd /srv/repo
printf 'def mean(values):\\n    return sum(values) / 2\\n' > stats.py
cat > test_stats.py <<'END'
from stats import mean


def test_mean():
    assert mean([2, 4, 6]) == 4
    assert mean([1, 2]) == 1.5
END
echo pytest > requirements.txt
git init -q . && git add .
git -c user.name=example -c user.email=example@example.com commit -qm first
git config --global url.file:///srv/repo.insteadOf https://example.com/repo
"""


def put(sandbox) -> None:
    sandbox.exec(SETUP, check=True)
