"""Decoders of files: run folders, checkpoints, settings, data sets, certificates and keys."""

from __future__ import annotations

import io
import json
import pickle
import runpy
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flower_fakes import net
from fuzz_decoder import Decoder
from fuzz_inputs import HOSTILE_TOML, json_bytes, mutated, safetensors_files
from fuzz_messages import PLACES, STATE
from hypothesis import strategies as st
from PIL import Image

from client_app.keeping import KeptModel, Trained
from fl_app.data import open_split
from fl_app.node_config import read_nodes
from server_app.doctor.data import NodeConfig
from server_app.doctor.network import ServerFiles, certificate, node_key, server_certificate
from server_app.replay.imports import list_checkpoints
from server_app.settings.catalogue import merge_settings
from strategies.client.logits import LogitCache, Logits
from strategies.client.round_state import RoundState
from strategies.core.checkpoints import read_checkpoint
from strategies.core.durable import read_json, with_digest
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec, Snapshot, Upload
from strategies.run.checkpoint import CheckpointFolder
from strategies.run.ensembles import load_ensemble, save_ensemble
from strategies.run.files import JsonLines, read_weights, weights_bytes
from strategies.run.run_folder import RunFolder
from strategies.run.traffic import Moved, Traffic
from strategies.run.uploads import UploadStore

ROOT = Path(tempfile.mkdtemp(prefix="files-", dir=PLACES))
RUN_ID = "ab" * 16


def _file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """Return what writes bytes to a file and reads it."""
    path = ROOT / name

    def write_and_read(data: bytes) -> Any:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
        return read(path)

    return write_and_read


WEIGHTS = weights_bytes(STATE)
ROW = {
    "client": "alice", "architecture": "net", "sha256": "ab" * 32, "bytes": 100, "arrived": "2026-01-01T00:00:00",
    "num_examples": 10, "label_counts": [1, 2, 3, 4], "pretrained": False, "ranges": {"0": [0.0, 1.0]},
}  # fmt: skip
NAMES = ("alice", "bob", "carol")
LINES = b"".join(json.dumps(with_digest({**ROW, "client": name})).encode() + b"\n" for name in NAMES)
RUN = {"id": RUN_ID, "method": "dense", "settings": {"seed": 1, "data.name": "digits"}, "versions": {"torch": "2.9"}}

# A run folder's pieces.


def _checkpoint_files() -> tuple[dict[str, Any], dict[str, bytes]]:
    folder = CheckpointFolder(ROOT / "checkpoint")
    state = {"model": {"a": torch.ones(2)}, (1, "x"): [1.5, float("nan"), None, True, np.arange(3)], "t": (1, 2)}
    folder.save(Snapshot(step=3, state=state, appended={"images": torch.zeros(2, 3)}))
    files = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    return json.loads(files.pop("checkpoint.json")), files


INDEX, PIECES = _checkpoint_files()


def _load_checkpoint(data: bytes) -> Any:
    path = ROOT / "checkpoint"
    for name, content in PIECES.items():
        (path / name).write_bytes(content)
    (path / "checkpoint.json").write_bytes(data)
    return CheckpointFolder(path).load()


def _ensemble_facts() -> dict[str, Any]:
    upload = Upload(UploadFacts("alice", "net", 10, (1, 2, 3, 4), ranges={"0": (0.0, 1.0)}), lambda: STATE)
    save_ensemble(ROOT / "ensemble", EnsembleSpec(("alice",), "mean", {"w": torch.ones(1)}), [upload])
    facts: dict[str, Any] = json.loads((ROOT / "ensemble" / "ensemble.json").read_text())
    return facts


ENSEMBLE = _ensemble_facts()


def _kept(name: str, read: Callable[[], Any], folder: Path = ROOT / "state" / RUN_ID) -> Callable[[bytes], Any]:
    """Return what puts a file where a client keeps its own, and asks for it."""
    return _file(str(folder / name), lambda _: _refuse_nothing(read()))


def _refuse_nothing(found: Any) -> Any:
    # Its owner begins anew, or asks again: nothing found is the refusal.
    if found is None or found == (0, {}):
        raise LookupError("nothing is kept here")
    return found


STATES = ROOT / "state" / RUN_ID
COPY, MEMORY = KeptModel(str(ROOT / "state"), RUN_ID, "alice", 1), RoundState(STATES, "alice")
COPY.save(Trained(UploadFacts("alice", "net", 9, (1, 2, 3, 3), ranges={"0": (0.0, 1.0)}), 0.5, 0.5), STATE)
MEMORY.save(3, STATE)

CACHE, KEY = LogitCache(str(ROOT / "state"), RUN_ID, "alice", "held"), "cd" * 32
CACHE.save(KEY, Logits(("a", "b"), np.zeros((2, 3, 4), np.float32), np.arange(3), np.zeros(0, np.float32)))
LOGITS = CACHE._path(KEY)


# Checkpoints from anybody.


def _saved(content: Any, *, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def _rezipped(**changes: bytes) -> bytes:
    """A torch file with some entries replaced, compressed."""
    with zipfile.ZipFile(io.BytesIO(_saved({"a": torch.arange(4.0)}))) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for part, data in changes.items():
        name = next((name for name in entries if name.endswith(f"/{part.replace('__', '/')}")), part)
        entries[name] = data
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name, data in entries.items():
            packed.writestr(name, data)
    return stream.getvalue()


def _giant() -> bytes:
    """A torch file that says of a tensor of four numbers that it has 2^40."""
    with zipfile.ZipFile(io.BytesIO(_saved({"a": torch.arange(4.0)}))) as archive:
        told = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    return _rezipped(**{"data.pkl": told.replace(b"K\x04", b"\x8a\x06\x00\x00\x00\x00\x00\x01")})


def _nested_pickle() -> bytes:
    return b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."


PICKLES = (
    _saved({"state_dict": STATE, "epoch": 3}), _saved(STATE), _saved(STATE, legacy=True),
    pickle.dumps([print, {"a": 1}]),
    _saved({"a": torch.ones(2).bfloat16(), "b": torch.eye(2).to_sparse()}),
)  # fmt: skip


@st.deferred
def HOSTILE_PICKLES() -> st.SearchStrategy[bytes]:  # noqa: N802  a constant, packed when it is first drawn from
    bomb = bytes(600 * 2**20)
    return st.sampled_from((
        _giant(), _nested_pickle(), _rezipped(data__0=bomb), _rezipped(bomb=bomb),
        _rezipped(**{"data.pkl": _nested_pickle()}), _rezipped(**{"../../evil": b"x"}), b"PK\x05\x06" + bytes(18),
    ))  # fmt: skip


def _read_pt(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_checkpoint(path)


def _tensors(found: dict[str, Any]) -> None:
    assert found
    assert all(isinstance(value, torch.Tensor) for value in found.values())


# Settings.

MAP = b"""[keys]
"backbone." = ""
["a.pt"]
name = "alice"
architecture = "net"
num-examples = 10
label-counts = [1, 2, 3, 4]
keys = { "net." = "" }
"""
SETTINGS = b'method = "dense"\nseed = 1\n[data]\nname = "digits"\nalpha = 0.1\n'
NODE = (
    b'client = "a"\npartition-id = 1\nnum-partitions = 3\nmax-ensemble-mib = 5.0\ncheckpoint = "m.pt"\ndevice = "cpu"\n'
)
PAIRS = b"method=dense seed=1 data.name='digits' data.alpha=0.1"
KINDS = {"method": str, "seed": int, "data.name": str, "data.alpha": float}


def toml(good: bytes) -> st.SearchStrategy[bytes]:
    """A TOML file that is none, or says something else."""
    return st.one_of(mutated(good, *HOSTILE_TOML[4:8]), st.sampled_from(HOSTILE_TOML))


def _map(path: Path) -> Any:
    (path.parent / "a.pt").touch()
    return list_checkpoints(path.parent, path, architecture="net", known=("net",), num_classes=4)[0]


# Data sets.

HEART = b"".join(
    b"%d.0,%d.0,%d.0,145.0,233.0,1.0,%d.0,150.0,0.0,2.3,3.0,0.0,6.0,%d\n" % (40 + n, n % 2, 1 + n % 4, n % 3, n % 2)
    for n in range(12)
)
NEWS = b"".join(b'"%d","a title","some, ""words"" %d"\n' % (1 + n % 4, n) for n in range(8))


def _heart(data: bytes) -> Any:
    folder = ROOT / "heart" / "heart-disease"
    folder.mkdir(parents=True, exist_ok=True)
    for centre in ("cleveland", "hungarian", "switzerland", "va"):
        (folder / f"processed.{centre}.data").write_bytes(HEART)
    (folder / "processed.va.data").write_bytes(data)
    return open_split("heart-disease", "train", root=str(ROOT / "heart"), download=False).take()


def _news(path: Path) -> Any:
    return open_split("ag-news", "train", root=str(ROOT / "news"), download=False).take()


def _idx(shape: tuple[int, ...]) -> bytes:
    head = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    return head + bytes(int(np.prod(shape)))


def _mnist(path: Path) -> Any:
    raw = path.parent
    for name, shape in (("train-labels", (5,)), ("t10k-images", (5, 28, 28)), ("t10k-labels", (5,))):
        (raw / f"{name}-idx{len(shape)}-ubyte").write_bytes(_idx(shape))
    return open_split("mnist", "train", root=str(ROOT / "mnist"), download=False).take()


def _png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(stream, "PNG")
    return stream.getvalue()


def _image(path: Path) -> Any:
    root = ROOT / "images"
    for half in ("train", "test"):
        (root / half / "cat").mkdir(parents=True, exist_ok=True)
        (root / half / "cat" / "good.png").write_bytes(PNG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_split("imagefolder", "train", root=str(root), image_size=8, download=False).take()


PNG = _png()


def _finite(found: Any) -> None:
    assert bool(torch.isfinite(found.images.double()).all())
    assert len(found.images) == len(found.labels)


# Doctor.


def _made_keys() -> tuple[bytes, ...]:
    """Return a server's certificate and key, and a node's key, as deploy/make_keys.py makes them."""
    make = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "make_keys.py"))["main"]
    with redirect_stdout(io.StringIO()):
        make([str(ROOT / "keys"), "--server", "localhost", "--node", "a"])
    return tuple(
        (ROOT / "keys" / name).read_bytes() for name in ("server/server.pem", "server/server.key", "a/node.key")
    )


CERTIFICATE, SERVER_KEY, NODE_KEY = _made_keys()


def _findings(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return what raises the first finding that is an error."""

    def look(path: Path) -> Any:
        found = list(read(path))
        wrong = [finding for finding in found if finding.level == "error"]
        if wrong:
            raise LookupError(wrong[0].found)
        return found

    return look


def _certificates(path: Path) -> Any:
    (path.parent / "server.key").write_bytes(SERVER_KEY)
    (path.parent / "server.key").chmod(0o600)
    yield certificate(path)
    yield from server_certificate(
        ServerFiles(ROOT / "keys" / "ca.crt", path, path.parent / "server.key"), ("localhost",)
    )


NOTHING = (LookupError,)
FILES: dict[str, Decoder] = {
    "json lines": Decoder(st.one_of(mutated(LINES), json_bytes(ROW).map(lambda line: line + b"\n" + LINES)),
                          _file("a.jsonl", lambda path: JsonLines(path).rows())),
    "json": Decoder(json_bytes(RUN), _file("a.json", read_json)),
    "run.json": Decoder(json_bytes(RUN), _file("run/run.json", lambda p: RunFolder.open(p.parent, write=False).id)),
    "uploads.jsonl": Decoder(
        st.one_of(mutated(LINES), json_bytes(ROW).map(lambda line: line + b"\n" + LINES)),
        _file("round/uploads.jsonl", lambda path: UploadStore(path.parent).records()),
    ),
    "traffic.json": Decoder(
        json_bytes(Traffic({"upload": Moved({"alice": 3}, {"alice": 4})}).as_json()),
        _file("traffic.json", Traffic.read),
    ),
    "weights file": Decoder(safetensors_files(WEIGHTS), _file("a.safetensors", read_weights), look=_tensors),
    "stage checkpoint": Decoder(json_bytes(INDEX), _load_checkpoint),
    "ensemble": Decoder(json_bytes(ENSEMBLE), _file("ensemble/ensemble.json",
                        lambda path: load_ensemble(path.parent, {"net": net}))),
    "round state": Decoder(safetensors_files((STATES / "alice-state-3.safetensors").read_bytes()),
                           _kept("alice-state-3.safetensors", lambda: MEMORY.before(4)), NOTHING),
    "client's copy": Decoder(json_bytes(read_json(STATES / "alice-1.json")), _kept("alice-1.json", COPY.load), NOTHING),
    "kept logits": Decoder(mutated(LOGITS.read_bytes()),
                           _kept(LOGITS.name, lambda: CACHE.known(["a"]), LOGITS.parent), NOTHING),
    "torch checkpoint": Decoder(st.one_of(mutated(*PICKLES), HOSTILE_PICKLES),
                                _file("a.pt", _read_pt), look=_tensors),
    "safetensors": Decoder(safetensors_files(WEIGHTS), _file("b.safetensors", _read_pt), look=_tensors),
    "market map": Decoder(toml(MAP), _file("market/map.toml", _map)),
    "settings file": Decoder(toml(SETTINGS), _file("s.toml", lambda path: merge_settings([str(path)], KINDS))),
    "settings pairs": Decoder(mutated(PAIRS).map(lambda data: data.decode("utf-8", "surrogateescape")),
                              lambda text: merge_settings([text], KINDS)),
    "node config": Decoder(toml(NODE), _file("node/n.toml", read_nodes)),
    "node pairs": Decoder(mutated(b'client="a" partition-id=1 device="cpu"').map(lambda d: d.decode("latin-1")),
                          lambda text: NodeConfig.of(text).client),
    "heart disease": Decoder(mutated(HEART), _heart, look=_finite),
    "ag-news": Decoder(mutated(NEWS), _file("news/ag_news/train.csv", _news), look=_finite),
    "mnist": Decoder(mutated(_idx((5, 28, 28))), _file("mnist/MNIST/raw/train-images-idx3-ubyte", _mnist),
                     look=_finite),
    "image": Decoder(mutated(PNG), _file("images/train/cat/bad.png", _image), look=_finite),
    "certificate": Decoder(mutated(CERTIFICATE), _file("tls/a.crt", _findings(_certificates)), NOTHING),
    "node key": Decoder(mutated(NODE_KEY, SERVER_KEY), _file("tls/a.key", _findings(node_key)), NOTHING),
}  # fmt: skip
