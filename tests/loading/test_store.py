"""Model store: names, atomic pulls, hashes, concurrency, clear errors. No test uses the network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tellin.exceptions import ModelDownloadError, ModelNotFoundError, UnsupportedModelError
from tellin.loading import hub, pip_download, store, store_files
from tellin.loading.store_catalog import KNOWN_MODELS, KnownModel, StoredFile
from tellin.settings import Settings
from tests.loading.gguf_writer import gguf_bytes

CONTENT = gguf_bytes({"general.architecture": "llama"})
HALF = len(CONTENT) // 2

FAKE_PIP = """
import pathlib, shutil, sys, time
arguments = [a for a in sys.argv[1:] if not a.startswith("-")]
dest = next(a.removeprefix("--dest=") for a in sys.argv if a.startswith("--dest="))
source = pathlib.Path(__file__).parent
with open(source / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if (source / "error").exists():
    print((source / "error").read_text(), file=sys.stderr)
    sys.exit(1)
time.sleep(float((source / "delay").read_text()) if (source / "delay").exists() else 0)
for wheel in source.glob("*.whl"):
    shutil.copy(wheel, dest)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model in two packages, known under the name ``toy``."""
    toy = KnownModel(
        name="toy",
        description="two halves",
        license="none",
        requirements=("toy-a==1.0", "toy-b==1.0"),
        download_bytes=1000,
        files=(
            StoredFile(
                "toy.gguf",
                (("toy-a", "toy_a/part0"), ("toy-b", "toy_b/part1")),
                len(CONTENT),
                hashlib.sha256(CONTENT).hexdigest(),
            ),
        ),
        entry="toy.gguf",
    )
    _know(monkeypatch, toy)
    return toy


def _know(monkeypatch: pytest.MonkeyPatch, toy: KnownModel) -> None:
    monkeypatch.setattr(store, "KNOWN_MODELS", (toy,))
    monkeypatch.setattr(store, "known_model", lambda name: toy if name == toy.name else None)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for pip and its index: a folder of wheels that a script copies."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP)
    for package, member, data in (
        ("toy_a", "toy_a/part0", CONTENT[:HALF]),
        ("toy_b", "toy_b/part1", CONTENT[HALF:]),
    ):
        with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, data)
    monkeypatch.setattr(
        pip_download, "_pip_command", lambda name: [sys.executable, str(folder / "pip.py")]
    )
    return folder


def _calls(index: Path) -> list[str]:
    return (index / "calls").read_text().splitlines() if (index / "calls").exists() else []


def _visible(settings: Settings) -> list[str]:
    models = settings.home / "models"
    return sorted(path.name for path in models.iterdir()) if models.exists() else []


def test_pull_joins_parts_and_resolves(settings: Settings, model: KnownModel, index: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = store.pull("toy", settings, lambda done, total: seen.append((done, total)))
    assert path == settings.home / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (1000, 1000)
    assert store.resolve_model("toy", settings) == path
    assert _visible(settings) == ["toy"]
    (call,) = _calls(index)
    assert "--no-deps" in call
    assert "--only-binary=:all:" in call
    assert call.endswith("toy-a==1.0 toy-b==1.0")


def test_second_pull_fetches_nothing(settings: Settings, model: KnownModel, index: Path) -> None:
    path = store.pull("toy", settings)
    # The lock is a file in the store: where that is read-only, pulled models can still be named.
    (settings.home / ".locks" / "toy.lock").unlink()
    (settings.home / ".locks" / "toy.lock").mkdir()
    assert store.pull("toy", settings) == path
    assert len(_calls(index)) == 1


def test_damaged_copy_is_fetched_again(settings: Settings, model: KnownModel, index: Path) -> None:
    path = store.pull("toy", settings)
    path.write_bytes(CONTENT[:HALF])
    with pytest.raises(ModelNotFoundError, match="tellin pull toy"):
        store.resolve_model("toy", settings)
    assert store.pull("toy", settings).read_bytes() == CONTENT
    assert _visible(settings) == ["toy"]


def test_no_download_unless_asked(settings: Settings, model: KnownModel, index: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"fetch it with 'tellin pull toy'.*download=True"):
        store.resolve_model("toy", settings)
    assert _calls(index) == []
    assert not settings.home.exists()
    assert store.resolve_model("toy", settings, download=True).read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["/no/such.gguf", "./toy", "x.gguf", "dir/x.gguf", "~/nothing-x"])
def test_path_never_touches_the_network(
    settings: Settings, model: KnownModel, index: Path, name: str
) -> None:
    """P48: a path is a path, whatever `download` says."""
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        store.resolve_model(name, settings, download=True)
    assert _calls(index) == []


def test_existing_path_is_returned(
    settings: Settings, model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "file").write_bytes(CONTENT)
    (tmp_path / "toy").write_bytes(CONTENT)
    assert store.resolve_model("org/file", settings) == Path("org/file")
    assert store.resolve_model("./toy", settings) == Path("toy")
    assert store.resolve_model(Path("toy"), settings) == Path("toy")
    with pytest.raises(ModelNotFoundError, match="tellin pull toy"):
        store.resolve_model("toy", settings)


def test_unknown_names_list_the_known(settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2'\? .*gemma3-270m, minilm"):
        store.resolve_model("smolm2", settings, download=True)
    with pytest.raises(ModelNotFoundError, match="name is empty"):
        store.resolve_model("", settings)
    for name in ("a" * 5000, "./" + "a" * 5000):
        with pytest.raises(
            ModelNotFoundError, match=r"a\.\.\.' cannot be looked up: File name too"
        ):
            store.resolve_model(name, settings)
    with pytest.raises(ModelNotFoundError, match=r"'~nobody-here/x' cannot be looked up: .*home"):
        store.resolve_model("~nobody-here/x", settings)
    with pytest.raises(ModelNotFoundError, match="known names are smollm2"):
        store.pull("bogus", settings)


def test_wrong_hash_is_refused(
    settings: Settings, model: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(model, files=(replace(model.files[0], sha256="0" * 64),))
    _know(monkeypatch, wrong)
    with pytest.raises(ModelDownloadError, match=rf"{model.files[0].sha256}.*expected 0000"):
        store.pull("toy", settings)
    assert _visible(settings) == []


@pytest.mark.parametrize("data", [CONTENT[HALF:-1], CONTENT[HALF:] + b"x" * (1 << 21)])
def test_wrong_size_is_refused(
    settings: Settings, model: KnownModel, index: Path, data: bytes
) -> None:
    with zipfile.ZipFile(index / "toy_b-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_b/part1", data)
    with pytest.raises(ModelDownloadError, match="is not the expected file"):
        store.pull("toy", settings)
    assert _visible(settings) == []


def test_damaged_wheels_are_refused(settings: Settings, model: KnownModel, index: Path) -> None:
    wheel = index / "toy_b-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as other:
        other.writestr("else", b"")
    with pytest.raises(ModelDownloadError, match="toy-b is damaged or has no toy_b/part1"):
        store.pull("toy", settings)
    wheel.write_bytes(b"no zip")
    with pytest.raises(ModelDownloadError, match="toy-b is damaged"):
        store.pull("toy", settings)
    wheel.unlink()
    with pytest.raises(ModelDownloadError, match=r"no wheel of toy-b==1\.0"):
        store.pull("toy", settings)
    assert _visible(settings) == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("NewConnectionError: nope\nERROR: No matching distribution found", "cannot be reached"),
        ("ERROR: No matching distribution found for toy-a==1.0", "has no wheel of toy-a==1.0"),
        ("ERROR: [Errno 28] No space left on device", "no space left"),
        ("ERROR: something new", r"pip could not fetch .*something new"),
    ],
)
def test_pip_errors_are_explained(
    settings: Settings, model: KnownModel, index: Path, output: str, message: str
) -> None:
    (index / "error").write_text(output)
    with pytest.raises(ModelDownloadError, match=message):
        store.pull("toy", settings)
    assert _visible(settings) == []


def test_missing_pip(
    settings: Settings, model: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pip_download.shutil, "which", lambda name: None)
    with pytest.raises(ModelDownloadError, match="has no pip"):
        store.pull("toy", settings)


def test_full_disk(
    settings: Settings, model: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        store_files.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=100)
    )
    with pytest.raises(ModelDownloadError, match=r"0 MiB free; free some, or set TELLIN_HOME"):
        store.pull("toy", settings)
    assert _calls(index) == []


def test_home_that_is_a_file(settings: Settings, model: KnownModel, index: Path) -> None:
    settings.home.write_text("in the way")
    with pytest.raises(ModelDownloadError, match="cannot pull toy"):
        store.pull("toy", settings)


def test_concurrent_pulls_fetch_once(settings: Settings, model: KnownModel, index: Path) -> None:
    (index / "delay").write_text("0.3")
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(store.pull("toy", settings))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [settings.home / "models" / "toy" / "toy.gguf"] * 4
    assert len(_calls(index)) == 1


def test_interrupt_leaves_nothing(
    settings: Settings, model: KnownModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a download ends the child and removes what it had written."""
    (index / "delay").write_text("60")
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        children.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        return children[-1]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pip_download.subprocess, "Popen", remember)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        store.pull("toy", settings, interrupt)
    assert time.perf_counter() - start < 20
    assert children[0].returncode is not None
    assert _visible(settings) == []


def test_leftovers_of_a_killed_pull_go_away(
    settings: Settings, model: KnownModel, index: Path
) -> None:
    stale = settings.home / "models" / ".partial-toy-abc"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    store.pull("toy", settings)
    assert _visible(settings) == ["toy"]


def test_list_models(settings: Settings, model: KnownModel, index: Path) -> None:
    (before,) = store.list_models(settings)
    assert (before.name, before.is_pulled, before.num_bytes) == ("toy", False, len(CONTENT))
    store.pull("toy", settings)
    (settings.home / "models" / "org--net").mkdir()
    (settings.home / "models" / "org--net" / "m.gguf").write_bytes(CONTENT)
    toy, other = store.list_models(settings)
    assert toy.is_pulled
    assert toy.path.is_file()
    assert (other.name, other.is_pulled, other.num_bytes) == ("org/net", True, len(CONTENT))
    assert store.resolve_model("org/net", settings).name == "m.gguf"


def test_catalog_is_consistent() -> None:
    """Every source package is pinned among the requirements; hashes are whole."""
    for model in KNOWN_MODELS:
        pinned = {requirement.partition("==")[0] for requirement in model.requirements}
        assert all("==" in requirement for requirement in model.requirements)
        assert {package for file in model.files for package, _ in file.sources} == pinned
        assert all(len(file.sha256) == 64 for file in model.files)
        assert model.entry in {"", *(file.path for file in model.files)}
        assert model.download_bytes < model.num_bytes


class _FakeHub(types.ModuleType):
    """The few names of huggingface_hub that are used."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("huggingface_hub")
        self.files = files
        self.errors = types.ModuleType("huggingface_hub.errors")
        self.errors.RepositoryNotFoundError = type("RepositoryNotFoundError", (Exception,), {})
        self.errors.GatedRepoError = type("GatedRepoError", (Exception,), {})

    def HfApi(self) -> _FakeHub:  # noqa: N802
        return self

    def model_info(self, repository: str, files_metadata: bool) -> types.SimpleNamespace:
        if repository == "org/none":
            raise self.errors.RepositoryNotFoundError("404\n\nRepository Not Found")
        if repository == "org/offline":
            raise ConnectionError("no route to host")
        siblings = [
            types.SimpleNamespace(rfilename=name, size=len(data))
            for name, data in self.files.items()
        ]
        return types.SimpleNamespace(sha="abc", siblings=siblings)

    def hf_hub_download(self, repository: str, file: str, revision: str, local_dir: Path) -> None:
        assert revision == "abc"
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        (local_dir / file).write_bytes(self.files[file])


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> _FakeHub:
    fake = _FakeHub({"README.md": b"", "a-Q4_K_M.gguf": CONTENT, "a-Q8_0.gguf": CONTENT + b"8"})
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", fake.errors)
    return fake


def test_hub_repository(settings: Settings, fake_hub: _FakeHub) -> None:
    with pytest.raises(ModelNotFoundError, match="tellin pull org/net"):
        store.resolve_model("org/net", settings)
    seen: list[tuple[int, int]] = []
    path = store.pull("org/net", settings, lambda done, total: seen.append((done, total)))
    assert path.name == "a-Q4_K_M.gguf"
    assert seen == [(len(CONTENT), len(CONTENT))]
    assert [file.name for file in path.parent.iterdir()] == ["a-Q4_K_M.gguf"]
    assert store.resolve_model("org/net", settings) == path
    assert store.pull("org/net:Q8_0", settings).name == "a-Q8_0.gguf"
    assert [model.name for model in store.list_models(settings)][-2:] == ["org/net", "org/net:Q8_0"]


def test_hub_errors(settings: Settings, fake_hub: _FakeHub) -> None:
    with pytest.raises(ModelNotFoundError, match="org/none: 404"):
        store.pull("org/none", settings)
    with pytest.raises(ModelDownloadError, match="org/offline: no route"):
        store.pull("org/offline", settings)
    with pytest.raises(ModelNotFoundError, match=r"which file\?.*a-Q4_K_M, a-Q8_0"):
        store.pull("org/net:Q2_K", settings)
    assert _visible(settings) == []


def test_hub_needs_its_extra(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelDownloadError, match=r"pip install 'tellin\[hf\]'"):
        store.pull("org/net", settings)


def test_choose_files() -> None:
    folder = ["config.json", "model.safetensors", "tokenizer.json", "x.bin", "onnx/model.onnx"]
    assert hub.choose_files("o/m", folder, "") == sorted(folder[:3])
    split = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf", "m-f16.gguf"]
    assert hub.choose_files("o/m", split, "") == split[:2]
    assert hub.choose_files("o/m", split, "F16") == split[2:]
    with pytest.raises(UnsupportedModelError, match=r"has neither.*is a pickle.*save_pretrained"):
        hub.choose_files("o/m", ["pytorch_model.bin", "config.json"], "")
    with pytest.raises(UnsupportedModelError, match=r"has neither .*model\.safetensors\Z"):
        hub.choose_files("o/m", ["x.bin", "config.json"], "")
