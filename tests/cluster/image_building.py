"""Builds cluster/Dockerfile without a container engine: in a fresh Debian, by chroot in a mount namespace.

    image = fresh_debian(folder, "bookworm")
    for step in steps_of(DOCKERFILE): image.apply(step, {"TORCH_INDEX": url})
    image.run("ray --version")                # as the user of the image, in its working folder

It knows the instructions that the file uses; any other is an error, so that no step goes untested.
"""

import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "cluster" / "Dockerfile"
MIRROR = "http://deb.debian.org/debian"
# As a build gets them from its host: the addresses of name servers, and certificates of a proxy.
RESOLVERS, CERTIFICATES = Path("/etc/resolv.conf"), Path("/etc/ssl/certs/ca-certificates.crt")
ISOLATED = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec"]
ENTER = """
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot --userspec="$2" "$1" /bin/sh -ec "cd '$3'; $4"
"""


def steps_of(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word, rest) for word, rest in lines]


@dataclass
class Image:
    """A folder with the files of an image, and what its instructions have set so far."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"

    def apply(self, step: tuple[str, str], given: Mapping[str, str]) -> None:
        """Carry out one instruction."""
        word, rest = step
        if word == "RUN":
            self.run(rest)
        elif word == "ENV":
            name, _, value = rest.partition("=")
            self.env[name] = re.sub(r"\$(\w+)", lambda found: self._environment()[found[1]], value)
        elif word == "ARG":
            name, _, value = rest.partition("=")
            self.arguments[name] = given.get(name, value)
        elif word == "WORKDIR":
            self.workdir = rest
            self._inside(rest).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            self._copy(rest.split())
        elif word == "USER":
            self.user = rest
        else:
            assert word == "FROM", f"{word} {rest}: tests cannot carry out this instruction"

    def run(self, command: str) -> str:
        """Run a shell command in the image; return what it prints."""
        user = f"{self.user}:{self.user}"
        words = [*ISOLATED, ENTER, "enter", str(self.folder), user, self.workdir, command]
        done = subprocess.run(
            words, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        home = "/root" if self.user == "0" else "/home/pencil"
        proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        host = {"PIP_CERT": "/run/host.crt"} if CERTIFICATES.exists() else {}
        return {"PATH": path, "HOME": home} | proxies | host | self.arguments | self.env

    def _copy(self, paths: list[str]) -> None:
        for name in paths[:-1]:
            source, target = ROOT / name, self._inside(self.workdir) / paths[-1]
            if source.is_dir():  # Docker copies what is in a folder, and links as links
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(source, target)

    def _inside(self, path: str) -> Path:
        return self.folder / path.lstrip("/")


def fresh_debian(folder: Path, suite: str) -> Image:
    """Install the smallest Debian into a folder, as the image on Docker Hub was made."""
    if os.geteuid() != 0:
        pytest.skip("only root can chroot into a fresh Debian")
    require_answer(f"{MIRROR}/dists/{suite}/Release")
    words = [*_debootstrap(folder), "--variant=minbase", suite, str(folder / "root"), MIRROR]
    environment = os.environ | {"DEBOOTSTRAP_DIR": str(folder / "usr/share/debootstrap")}
    if shutil.which("debootstrap"):
        del environment["DEBOOTSTRAP_DIR"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    shutil.copy(RESOLVERS, folder / "root/etc/resolv.conf")
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, folder / "root/run/host.crt")
    return Image(folder / "root")


def _debootstrap(folder: Path) -> list[str]:
    """A script of Debian: the installed one, or the one in its package, which needs no installation."""
    if found := shutil.which("debootstrap"):
        return [found]
    if not shutil.which("apt-get"):
        pytest.skip("debootstrap is not installed")
    subprocess.run(["apt-get", "download", "debootstrap"], cwd=folder, capture_output=True)
    packages = list(folder.glob("debootstrap_*.deb"))
    if not packages:
        pytest.skip("debootstrap is not installed, and apt-get cannot download it")
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(folder)], check=True)
    return ["sh", str(folder / "usr/sbin/debootstrap")]


def require_answer(url: str) -> None:
    """Skip the test if this machine cannot reach a server."""
    try:
        urllib.request.urlopen(url, timeout=20).close()
    except OSError as error:
        pytest.skip(f"{url} cannot be reached from here: {error}")
