from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import MakeRun, oneshot

from server_app import __main__ as entry
from server_app import cli as command_line
from server_app.launch import superlink as launching
from server_app.launch.run_command import plan_run
from server_app.launch.superlink import Launched
from server_app.settings.catalogue import catalogue
from server_app.settings.choices import CHOICES
from server_app.settings.read import default_settings
from strategies.core.durable import read_json
from strategies.core.places import make_run_place
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder

ROOT = Path(command_line.__file__).parent.parent
RESULT: dict[str, Any] = {
    "status": "finished",
    "method": "dense",
    "seed": 0,
    "accuracy": 61.5,
    "best_accuracy": 62.0,
    "table": [
        {"name": "client-000", "kind": "client", "accuracy": 30.0},
        {"name": "FedENS", "kind": "ensemble", "accuracy": 60.0},
        {"name": "DENSE", "kind": "student", "accuracy": 61.5},
    ],
    "uploads": 5,
    "refused": 1,
    "refusals": [{"client": "node-7", "reason": "arrays[fc.weight] holds [bold]NaN[/nonsense]", "time": "now"}],
    "mib_up_per_client": 0.234789,
    "mib_down_per_client": 0.000143,
    "seconds": {"clients": 3.0, "server": 4.0, "app": 8.0},
    "weights_sha256": "ab" * 32,
    "resumed_at": 0,
    "plots": ["accuracy.png"],
}


class Engine:
    """Stands for Flower: notes what it is asked to run, and leaves what an app would leave."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, dict[str, Any], int]] = []
        self.result: Mapping[str, Any] | None = RESULT
        self.launched = Launched(0, "finished:completed", "")
        self.interrupted = False
        self.starts = True

    def __call__(
        self, app: Path, *, settings: Mapping[str, Any], num_supernodes: int, echo: Callable[[str], None], **_: Any
    ) -> Launched:
        self.calls.append((app, dict(settings), num_supernodes))
        echo("INFO :      a line of the log")
        if self.starts:
            flat = {**default_settings(), **settings}
            info = {"method": flat["method"], "settings": flat, "num-supernodes": num_supernodes}
            path = Path(str(settings.get("resume") or settings["run-dir"]))
            with RunFolder.open_or_create(path, info) as folder:
                if self.result is not None:
                    folder.write_result({**self.result, "run_dir": str(path)})
        if self.interrupted:
            raise KeyboardInterrupt
        return self.launched


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    found = Engine()
    monkeypatch.setattr(launching, "launch", found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    monkeypatch.setenv("ONESHOT_NUM_SUPERNODES", "")
    monkeypatch.setenv("COLUMNS", "100")
    return found


def cut_off(engine: Engine, *words: str) -> Path:
    """Return the folder of a run that was cut off."""
    engine.result, engine.interrupted = None, True
    ended = oneshot("run", *words)
    engine.result, engine.interrupted = RESULT, False
    folder = Path(engine.calls[-1][1].get("resume") or engine.calls[-1][1]["run-dir"])
    assert (ended.exit_code, ended.stderr) == (130, f"interrupted. To resume: oneshot resume {folder}\n")
    return folder


def elsewhere(engine: Engine, *words: str) -> Path:
    """Return the folder of a run of clients elsewhere that was cut off."""
    folder = cut_off(engine, *words)
    write_json(folder / "run.json", {**read_json(folder / "run.json"), "num-supernodes": 0})
    return folder


def test_a_run_that_succeeds_prints_its_table_and_exits_with_0(engine: Engine, tmp_path: Path) -> None:
    ended = oneshot("run")

    assert ended.exit_code == 0, ended.output
    assert ended.stderr == ""
    for part in (
        "a line of the log",
        "client-000",
        "DENSE",
        "61.50",
        "uploads      5 accepted, 1 refused",
        "node-7: arrays[fc.weight] holds [bold]NaN[/nonsense]",
        "moved        240.4 KiB up, 150 B down per client",
        "clients 3.0, server 4.0",
    ):
        assert part in ended.stdout
    ((app, settings, supernodes),) = engine.calls
    assert app == ROOT
    assert supernodes == 5
    folder = Path(settings["run-dir"])
    assert settings == {"run-dir": str(folder)}
    assert folder.parent == tmp_path / "runs"
    assert f"run folder   {folder}" in ended.stdout
    assert read_json(folder / "result.json")["seconds"].keys() == {"start", "clients", "server", "total"}


@pytest.mark.parametrize(
    ("words", "at_once"),
    [
        ("client.epochs=30", 1),  # 5 clients, 1,297 examples, batches of 32: 9 steps an epoch each, 1,350 in all
        ("client.epochs=60", None),  # 2,700
        ("client.epochs=60 data.limit=640", 1),  # 4 steps an epoch: 1,200
        ("client.epochs=60 client.steps=100", 1),
        ("client.epochs=1 model.name=cnn5 data.image-size=20", 1),
        ("client.epochs=10 model.name=cnn5 data.image-size=20", None),  # a client has 3 seconds of work
        ("client.epochs=10 model.per-client=lenet5,cnn5 model.student=lenet5 data.image-size=20", None),
        ("client.epochs=1 method=fens", None),  # whose clients answer again
        ("client.epochs=1 method=fedov", None),  # whose clients train something else
    ],
)
def test_one_process_trains_clients_that_have_little_work(words: str, at_once: int | None) -> None:
    assert plan_run(catalogue().settings([words]), 5).clients_at_once() == at_once


def test_json_when_asked_for_is_the_last_line_and_alone_on_standard_output(engine: Engine) -> None:
    ended = oneshot("run", "--format", "json")

    assert ended.exit_code == 0
    assert ended.stdout.count("\n") == 1
    assert ended.output.endswith(ended.stdout)  # nothing follows on standard error either
    assert "a line of the log" in ended.stderr
    result = json.loads(ended.stdout)
    assert result.keys() == RESULT.keys() | {"run_dir"}
    assert result == read_json(Path(result["run_dir"]) / "result.json")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "--run-config", "sede=1"], ["'sede'", "(value ", "did you mean 'seed'?"]),
        (["run", "--set", "sede=1"], ["'sede'", "did you mean 'seed'?"]),
        (["run", "--run-config", "method=fedprox"], ["'method'", "'fedprox'", "dense"]),
        (["run", "--run-config", "data.alpha=-1"], ["'data.alpha'", "-1", "greater than 0.0"]),
        (["run", "--run-config", "absent.toml"], ["absent.toml cannot be read"]),
        (["run", "--run-config", "seed"], ["'seed' is not a pair"]),
        (["run", "--set", "resume=absent"], ["absent: no run folder"]),
        (["resume", "absent"], ["absent: no run folder"]),
        (["replay", "absent"], ["absent: no run folder"]),
        (["replay", "absent", "--set", "sede=1"], ["'sede'", "did you mean 'seed'?"]),
        (["replay", "absent", "--run-config", "sede=1"], ["'sede'", "did you mean 'seed'?"]),
    ],
)
@pytest.mark.parametrize("output", ["text", "json"])
def test_bad_input_is_one_line_on_standard_error_and_exit_status_1(
    engine: Engine, words: list[str], parts: list[str], output: str
) -> None:
    ended = oneshot(*words, "--format", output)

    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit)  # no traceback
    assert engine.calls == []
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    for part in parts:
        assert part in ended.stderr
    if output == "text":
        assert ended.stdout == ""
    else:
        said = ended.stderr.removeprefix("error: ").rstrip("\n")
        assert json.loads(ended.stdout) == {"status": "failed", "error": said}


FAILED = Launched(1, "finished:failed", "Flower's own words")
COMPLETED = Launched(0, "finished:completed", "")


@pytest.mark.parametrize(
    ("launched", "result", "said"),
    [
        (FAILED, {"status": "failed", "error": "too few. All is kept"}, "too few. All is kept"),
        (COMPLETED, {"status": "failed", "error": "x"}, "x"),
        (COMPLETED, None, "it ended without a result"),
    ],
)
def test_a_run_without_a_finished_result_exits_with_1_and_says_why_and_how_to_go_on(
    engine: Engine, launched: Launched, result: Mapping[str, Any] | None, said: str
) -> None:
    engine.result, engine.launched = result, launched

    ended = oneshot("run")

    folder = engine.calls[0][1]["run-dir"]
    assert ended.exit_code == 1
    assert ended.stderr == f"error: the run failed: {said}. To resume: oneshot resume {folder}\n"


@pytest.mark.parametrize("way", ["resume", "run --run-config"])
def test_a_run_that_was_cut_off_goes_on_with_its_own_settings_and_clients(engine: Engine, way: str) -> None:
    folder = cut_off(engine, "--run-config", "seed=3 method=fedens", "--num-supernodes", "9")
    words = {"resume": ["resume", folder], "run --run-config": ["run", "--run-config", f"resume={folder}"]}[way]

    ended = oneshot(*words)

    assert ended.exit_code == 0, ended.output
    _, settings, supernodes = engine.calls[-1]
    assert (settings["seed"], settings["method"], supernodes) == (3, "fedens", 9)
    assert (settings["resume"], settings["run-dir"]) == (str(folder), "")
    assert settings.keys() == default_settings().keys()
    assert "DENSE" in ended.stdout


def test_a_finished_run_when_resumed_prints_its_result_and_starts_nothing(engine: Engine) -> None:
    first = oneshot("run", "--format", "json")
    folder = Path(json.loads(first.stdout)["run_dir"])
    before = (folder / "result.json").read_bytes()

    again = oneshot("resume", folder, "--format", "json")

    assert len(engine.calls) == 1
    assert (again.exit_code, again.stderr) == (0, "")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert (folder / "result.json").read_bytes() == before


def test_a_run_of_clients_elsewhere_is_resumed_here_only_where_it_asks_none_again(engine: Engine) -> None:
    folder = elsewhere(engine, "--method", "dense")
    engine.calls.clear()

    for words in (("resume", folder), ("run", "--set", f"resume={folder}")):
        ended = oneshot(*words)
        assert ended.exit_code == 1
        assert f"resume it by: flwr run APP SUPERLINK --run-config {folder / 'resume.toml'}\n" in ended.stderr
    assert engine.calls == []
    assert oneshot("run", "--set", f"resume={folder}", "--clients", "7").exit_code == 0  # a simulation by flwr run
    (folder / "result.json").unlink()
    write_json(folder / "stage.json", {"clients": ["hospital-a", "hospital-b"]})
    assert oneshot("resume", folder).exit_code == 0  # the server's part alone is left
    assert [supernodes for _, _, supernodes in engine.calls] == [7, 5]
    assert oneshot("resume", folder).exit_code == 0  # its result is printed


@pytest.mark.parametrize(
    "words", [["--method", "fens"], ["--method", "iterative"], ["--set", "method=dense dense.rounds=2"]]
)
def test_a_run_of_clients_elsewhere_that_are_asked_again_is_not_resumed_here(engine: Engine, words: list[str]) -> None:
    folder = elsewhere(engine, *words)
    write_json(folder / "stage.json", {"clients": ["hospital-a", "hospital-b"]})

    ended = oneshot("resume", folder)

    assert (ended.exit_code, len(engine.calls)) == (1, 1)
    assert "resume it by: flwr run APP SUPERLINK" in ended.stderr


def test_a_replay_from_the_command_line_prints_its_table_and_its_json(engine: Engine, run_folder: MakeRun) -> None:
    run = run_folder()

    text = oneshot("replay", run, "--method", "fedavg")
    few = ["--set", "server.epochs=1", "--set", "seed=4"]
    machine = oneshot("replay", run, "--method", "dense", *few, "--format", "json")

    assert (text.exit_code, text.stderr) == (0, "")
    assert "FedAvg (one shot)" in text.stdout
    assert "0 B up, 0 B down per client" in text.stdout
    assert machine.exit_code == 0
    result = json.loads(machine.stdout)
    assert (result["method"], result["seed"]) == ("dense", 4)
    assert Path(result["run_dir"]).parent == run.parent
    assert machine.output.endswith(machine.stdout)
    assert f"replay of {run}; its folder is {result['run_dir']}" in machine.stderr
    again = oneshot("replay", run, "--resume", result["run_dir"], "--format", "json")
    assert json.loads(again.stdout)["weights_sha256"] == result["weights_sha256"]
    assert engine.calls == []


def test_a_replay_goes_on_as_a_replay_only(
    engine: Engine, run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server_app.replay.stored.guarded_replay", interrupt)
    ended = oneshot("replay", run, "--method", "fedens")
    (target,) = set(run.parent.iterdir()) - {run}

    refused = oneshot("resume", target)

    assert ended.exit_code == 130
    assert ended.stderr == f"interrupted. To resume: oneshot replay {run} --resume {target}\n"
    assert refused.exit_code == 1
    assert f"To resume: oneshot replay {run} --resume {target}" in refused.stderr
    assert engine.calls == []


def test_methods_when_named_show_what_matters_first_and_the_values_of_their_presets(engine: Engine) -> None:
    ended = oneshot("methods", "dense", "fedavg", "dw-fedens")

    text = " ".join(ended.stdout.split())
    assert f"dense: {CHOICES['dense'].title} ({CHOICES['dense'].source})" in text
    assert f"{CHOICES['dense'].assumption}; result: student" in text
    assert "server.epochs = 24 " in text
    assert "preset co-boosting 500, published 200" in text
    first, rest = text.partition("further options")[::2]
    assert "server.batch-size" in first
    assert "server.student-clip" in rest
    assert "fedavg.weights = examples" in text
    assert "needs: every client's model has the same" in text
    assert "no options" in text


def test_latest_is_the_newest_run_of_its_own(
    engine: Engine, run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = run_folder(name="old"), run_folder(name="new")
    for run, time in ((old, "2026-01-01T10:00:00"), (new, "2026-01-02T10:00:00")):
        write_json(run / "run.json", {**read_json(run / "run.json"), "created": time})
    monkeypatch.setenv("ONESHOT_RUNS", str(new.parent))

    first = json.loads(oneshot("replay", "latest", "--method", "fedavg", "--format", "json").stdout)
    again = json.loads(oneshot("replay", "latest", "--method", "fedavg", "--format", "json").stdout)

    for result in (first, again):  # the replay itself is newer than both runs
        assert read_json(Path(result["run_dir"]) / "run.json")["replay-of"] == str(new)


def test_clean_removes_marked_folders_alone(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "state"))
    runs = [f"{number:032x}" for number in range(3)]
    for age, run in enumerate(runs):
        make_run_place(tmp_path / "state" / run)
        os.utime(tmp_path / "state" / run, (age, age))
    (tmp_path / "state" / ("f" * 32)).mkdir()
    (tmp_path / "state/ledger.jsonl").touch()

    some = oneshot("clean", "--keep", "1").output
    left = sorted(path.name for path in (tmp_path / "state").iterdir())
    rest = oneshot("clean", str(tmp_path / "state")).output

    assert some == f"removed the clients' models of 2 runs from {tmp_path / 'state'}\n"
    assert left == [runs[2], "f" * 32, "ledger.jsonl"]
    assert "of 1 runs" in rest
    shutil.rmtree(tmp_path / "state")
    assert "of 0 runs" in oneshot("clean").output


def test_list_shows_runs_with_their_facts(engine: Engine, run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(method="dense", seed=3)
    (run.parent / "damaged").mkdir()
    (run.parent / "damaged" / "run.json").write_text("{")
    monkeypatch.setenv("ONESHOT_RUNS", str(run.parent))
    write_json(run / "run.json", {**read_json(run / "run.json"), "created": "2026-01-01T10:00:00"})
    result = json.loads(oneshot("replay", run, "--method", "fedavg", "--format", "json").stdout)

    rows = json.loads(oneshot("list", "--format", "json").stdout)

    assert [(row["run"], row["kind"], row["method"], row["seed"], row["status"]) for row in rows] == [
        ("run", "run", "dense", 3, "unfinished"),
        (Path(result["run_dir"]).name, "replay", "fedavg", 3, "finished"),
    ]
    assert rows[1]["accuracy"] == result["accuracy"]
    text = oneshot("list").stdout
    assert text.startswith(f"2 runs in {run.parent}\n")
    assert "fedavg (replay)" in text
    table = oneshot("list", run.parent, "--format", "csv").stdout.splitlines()
    assert table[0].startswith("run,created,kind,method")
    assert len(table) == 3


def test_methods_when_listed_as_json_are_one_line_of_facts(engine: Engine) -> None:
    ended = oneshot("methods", "--format", "json")

    assert ended.stdout.count("\n") == 1
    facts = {entry["name"]: entry for entry in json.loads(ended.stdout)}
    assert list(facts) == list(CHOICES)
    assert facts["fedavg"]["kind"] == "baseline"
    assert facts["label-count-ensemble"]["needs"]
    (epochs,) = [option for option in facts["dense"]["options"] if option["key"] == "server.epochs"]
    assert epochs["presets"] == {"quick": 24, "published": 200, "co-boosting": 500}
    assert epochs.keys() == {"key", "main", "presets", "allowed", "help"}


def test_run_that_another_process_works_on_is_one_line_and_not_resumed(engine: Engine, tmp_path: Path) -> None:
    engine.result = {"status": "failed", "error": "cut off"}
    oneshot("run", "--set", "run-dir=here")
    with RunFolder.open(tmp_path / "here"):
        refused = oneshot("resume", tmp_path / "here")

    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == (
        f"error: {tmp_path / 'here'}: run folder is in use by process {os.getpid()}, call close() of what opened it "
        "here\n"
    )
    assert len(engine.calls) == 1


def test_escape_codes_of_others_are_written_out_in_lists_and_results(engine: Engine, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "runs" / "eve", {"method": "\x1b[31mred", "seed": 0}).close()
    reason = {"client": "eve", "reason": "\x1b]0;title\x07", "time": "now"}
    engine.result = {**RESULT, "refusals": [reason], "table": [{"name": "\x1b[2J", "kind": "client", "accuracy": 1.0}]}

    shown = oneshot("list").stdout + oneshot("run").stdout

    assert "\x1b" not in shown
    assert r"\x1b[31mred" in shown
    assert r"\x1b[2J" in shown
    assert r"\x1b]0;title\x07" in shown


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num-supernodes", "1"], "'min-uploads' is 2: must be at most 1, the number of clients"),
        (["--run-config", "data.name=imagefolder data.image-size=32 data.root=nowhere"], "set data.root to a folder"),
        (["--run-config", "method=dense data.image-size=18"], "shape is (1, 18, 18): method 'dense' needs"),
    ],
)
def test_run_that_cannot_succeed_is_one_line_before_the_start(engine: Engine, words: list[str], reason: str) -> None:
    ended = oneshot("run", *words)

    assert ended.exit_code == 1
    assert engine.calls == []
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_loads_is_one_line_and_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "server_app.cli", Interrupted("server_app.cli"))
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_settings_are_read_is_one_line_and_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server_app.launch.run_command.plan_run", interrupt)
    ended = oneshot("run", "--local")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("words", "full"), [(["methods"], True), (["list", "--format", "json"], True), (["methods"], False)]
)
def test_an_output_that_cannot_be_written_is_one_line_and_a_closed_pipe_none(words: list[str], full: bool) -> None:
    reader, writer = os.pipe() if not full else (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    os.close(reader)
    command = [sys.executable, "-m", "server_app", *words]

    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)

    os.close(writer)
    assert ended.returncode == 1
    assert ended.stderr == ("error: the output cannot be written: No space left on device\n" if full else "")
