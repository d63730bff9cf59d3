from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import MakeRun, replayed

from strategies.core.durable import read_json
from strategies.core.errors import StoreError
from strategies.core.options import flatten
from strategies.method import METHODS, Need, Snapshot
from strategies.run.journal import Journal
from strategies.run.run_folder import RunFolder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# One of each kind; what holds for the registry alone, tests/contract/test_methods.py asks of every method.
QUICK = {"fedavg", "fedens", "fens", "dense", "tally"}


# Uploads of other kinds are in test_upload_kinds.py.
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in METHODS
        if METHODS[name].uploads == "classifier" and not METHODS[name].plan(METHODS[name].config()).asks.sums
    ],
)
def test_every_method_leaves_its_result_beside_the_run_and_the_run_as_it_was(run_folder: MakeRun, method: str) -> None:
    run = run_folder()
    if Need.COMMON_START in METHODS[method].needs:
        with RunFolder.open(run) as folder:
            folder.save_start(folder.round(1).uploads()[0].read())
    before = files_of(run)

    result = replayed(run, method)

    assert files_of(run) == before
    target = Path(result["run_dir"])
    assert target.parent == run.parent
    assert f"-replay-{method}-" in target.name
    assert read_json(target / "result.json") == json.loads(json.dumps(result))
    assert (result["method"], result["uploads"], result["resumed_at"]) == (method, 3, 0)
    assert (result["mib_up_per_client"], result["refused"]) == (0.0, 0)
    info = read_json(target / "run.json")
    assert (info["method"], info["replay-of"], info["settings"]["method"]) == (method, str(run), method)
    assert info["id"] != read_json(run / "run.json")["id"]
    assert info["config"].keys() == flatten(METHODS[method].config()).keys()
    assert (target / ("student.safetensors" if METHODS[method].kind != "ensemble" else "ensemble")).exists()


def test_a_replay_stores_the_config_that_it_works_with_and_not_its_run_s(run_folder: MakeRun) -> None:
    run = run_folder(method="fedens")

    result = replayed(run, "dense", preset="fedsyn", server__epochs=1, dense__bn_weight=0.0)

    stored = read_json(Path(result["run_dir"]) / "run.json")["config"]
    assert stored == flatten(METHODS["dense"].config.preset("fedsyn", epochs=1, bn_weight=0.0))


def test_a_replay_without_a_method_runs_the_run_s_own_and_gives_the_same_bits_each_time(run_folder: MakeRun) -> None:
    run = run_folder(method="fedavg")

    first, again = replayed(run), replayed(run)

    assert first["method"] == "fedavg"
    assert first["weights_sha256"] == again["weights_sha256"]
    assert first["run_dir"] != again["run_dir"]


def test_a_folder_without_uploads_is_refused_by_name(run_folder: MakeRun, tmp_path: Path) -> None:
    run = run_folder()
    replay = Path(replayed(run, "fedens")["run_dir"])
    (run / "uploads.jsonl").write_text("")

    with pytest.raises(StoreError, match=f"{run} holds no uploads; must be a run folder with at least one"):
        replayed(run, "fedens")
    with pytest.raises(StoreError, match=f"{replay} holds no uploads: it is a replay of {run}"):
        replayed(replay, "fedens")
    with pytest.raises(StoreError, match="no run folder"):
        replayed(tmp_path, "fedens")


class CutOffError(Exception):
    """The process dies."""


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server stage dies right after its first checkpoint; the next one does not."""
    checkpoint, deaths = Journal.checkpoint, [CutOffError("killed")]

    def dying(self: Journal, take: Callable[[], Snapshot]) -> None:
        self.interval_s = 0.0
        checkpoint(self, take)
        if deaths:
            raise deaths.pop()

    monkeypatch.setattr(Journal, "checkpoint", dying)


@pytest.mark.usefixtures("cut_off")
def test_a_replay_that_was_cut_off_goes_on_and_ends_with_the_same_bits(run_folder: MakeRun) -> None:
    run, lines = run_folder(), list[str]()
    with pytest.raises(CutOffError):
        replayed(run, "dense", dense__latent=6, log=lines.append)
    (target,) = {*run.parent.iterdir()} - {run}
    assert any(str(target) in line for line in lines)

    # The command repeats neither the method nor the settings.
    result = replayed(run, resume=target)

    whole = replayed(run, "dense", dense__latent=6)
    assert (result["resumed_at"], whole["resumed_at"]) == (1, 0)
    assert result["run_dir"] == str(target)
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert result["accuracy"] == whole["accuracy"]
    with RunFolder.open(target, write=False) as folder:
        assert [row["epoch"] for row in folder.round(1).metrics() if "epoch" in row] == [1, 2]


def test_a_finished_replay_when_resumed_does_no_work(run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder()
    result = replayed(run, "fedens")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the replay works though it is finished")

    monkeypatch.setattr("server_app.replay.stored.guarded_replay", never)

    assert replayed(run, resume=Path(result["run_dir"])) == json.loads(json.dumps(result))
