from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server_app import cli as command_line
from server_app.replay.request import Request
from server_app.replay.stored import replay_run
from server_app.report.communication import Cost, cost_of, cost_of_uploads, curve_of, moved_in, moved_lines, points_of
from server_app.report.evaluation import Row
from strategies.core.errors import StoreError
from strategies.core.facts import UploadFacts
from strategies.method import METHODS, Upload
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder
from strategies.run.traffic import MIB, Moved, Traffic

MakeRun = Callable[..., Path]


def run_uploads(run: Path) -> tuple[Upload, ...]:
    with RunFolder.open(run, write=False) as folder:
        return folder.round(1).uploads()


ROWS = [
    Row("client-000", "client", 30.0),
    Row("FedAvg (one shot)", "baseline", 40.0),
    Row("FedENS", "ensemble", 60.0),
    Row("DENSE", "student", 61.5),
]


def three_phases() -> Traffic:
    traffic = Traffic()
    for client in ("alice", "bob"):
        traffic.add("upload", client, up=4 * MIB, down=MIB)
        traffic.add("aggregator", client, up=MIB // 2, down=MIB // 2)
    traffic.add("ensemble", "alice", up=512, down=8 * MIB)
    return traffic


def test_a_cost_tells_every_phase_in_total_and_per_client_and_phases_add_up() -> None:
    cost = Cost(three_phases()).as_json()

    assert (cost["counted"], cost["clients"]) == ("messages", 2)
    assert list(cost["phases"]) == ["upload", "aggregator", "ensemble"]
    assert cost["phases"]["upload"] == {
        "mib_up": 8.0, "mib_down": 2.0, "mib_up_per_client": 4.0, "mib_down_per_client": 1.0,
    }  # fmt: skip
    # One of the two clients got the ensemble: the mean is over both.
    assert cost["phases"]["ensemble"]["mib_down_per_client"] == 4.0
    assert cost["phases"]["ensemble"]["mib_up"] == pytest.approx(512 / MIB, abs=1e-6)
    for key, amount in cost["total"].items():
        assert sum(phase[key] for phase in cost["phases"].values()) == pytest.approx(amount, abs=2e-6)
    assert Cost(three_phases()).of_uploads() == 5.0
    assert Cost(Traffic()).of_uploads() == 0.0


def test_a_run_costs_the_bytes_of_its_messages_in_all_its_rounds(run_folder: MakeRun) -> None:
    with RunFolder.open(run_folder()) as folder:
        path = folder.round(2).path
        path.mkdir()
        write_json(path / "traffic.json", {"phases": {"upload": {"up": {"client-000": 500}, "down": {}}}})
        moved, cost = moved_in(folder), cost_of(folder)

    assert cost == Cost(moved)
    assert moved.up == {"client-000": 1500, "client-001": 1001, "client-002": 1002}
    assert moved.down == dict.fromkeys(moved.up, 150)


def test_a_replay_has_the_cost_of_its_uploads_and_moves_nothing(run_folder: MakeRun) -> None:
    run = run_folder()
    traffic = Traffic.read(run / "traffic.json")
    traffic.add("ensemble", "client-000", down=MIB)
    traffic.save(pytest.fail)

    result = replay_run(Request(run, "fedens", {}), log=lambda _: None)

    assert (result["mib_up_per_client"], result["mib_down_per_client"]) == (0.0, 0.0)
    cost = result["communication"]
    assert cost["counted"] == "source"
    # The ensemble that the source run sent to its clients is none of this method's cost.
    assert list(cost["phases"]) == ["upload"]
    assert cost["total"]["mib_up"] * MIB == pytest.approx(3003, abs=2)
    assert cost["total"]["mib_down_per_client"] * MIB == pytest.approx(150, abs=1)
    assert moved_lines(result) == ["0 B up, 0 B down per client; the uploads cost 1001 B up, 150 B down"]


def test_uploads_that_came_by_no_message_cost_their_size(run_folder: MakeRun) -> None:
    run = run_folder()
    (run / "traffic.json").unlink()
    sizes = {path.stem: path.stat().st_size for path in (run / "uploads").iterdir()}

    cost = cost_of_uploads(run)

    assert cost is not None
    assert (cost.counted, cost.traffic.up) == ("sizes", sizes)
    assert set(cost.traffic.down.values()) == {0}
    with RunFolder.open(run, write=False) as folder:
        assert cost_of(folder) == cost


def test_the_cost_of_a_replay_whose_source_is_gone_is_not_known(run_folder: MakeRun, tmp_path: Path) -> None:
    run = run_folder()
    with RunFolder.create(tmp_path / "replay", {"replay-of": str(run), "method": "fedens"}) as folder:
        assert cost_of(folder) == Cost(Traffic.read(run / "traffic.json"), "source")
        shutil.rmtree(run)
        assert cost_of(folder) is None
    assert cost_of_uploads(tmp_path / "replay") is None


def test_a_run_on_the_uploads_of_another_has_their_cost_and_its_own_messages(
    run_folder: MakeRun, tmp_path: Path
) -> None:
    run = run_folder()
    info = {"uploads-of": str(run), "forgotten": ["client-001"], "method": "fedens"}
    with RunFolder.create(tmp_path / "without", info) as folder:
        for upload in run_uploads(run):
            if upload.client != "client-001":
                folder.round(1).accept(UploadFacts(upload.client, upload.architecture, 5), upload.read())
        account = Traffic.read(folder.path / "traffic.json")
        account.add("aggregator", "client-000", up=10, down=20)
        account.save(pytest.fail)

        cost = cost_of(folder)
        assert cost is not None
        assert (cost.counted, list(cost.traffic.phases)) == ("source", ["upload", "aggregator"])
        assert cost.traffic.up == {"client-000": 1010, "client-002": 1002}
        told = Cost(moved_in(folder)).as_json()["total"]
        assert moved_lines({**told, "communication": cost.as_json()}) == [
            "10 B up, 20 B down per client",
            "upload: 1001 B up, 150 B down, in another run",
            "aggregator: 5 B up, 10 B down",
        ]
        # A run that works on its uploads in turn, or replays them, counts those of the first run.
        again = cost_of_uploads(folder.path, without=["client-000"])
        assert again == Cost(Traffic({"upload": Moved({"client-002": 1002}, {"client-002": 150})}), "source")
        shutil.rmtree(run)
        gone = cost_of(folder)
    assert gone is not None
    assert (gone.counted, sorted(gone.traffic.phases)) == ("sizes", ["aggregator", "upload"])


def test_a_damaged_account_is_one_line(run_folder: MakeRun) -> None:
    run = run_folder()
    (run / "traffic.json").write_text('{"phases": 3}')

    with RunFolder.open(run) as folder, pytest.raises(StoreError, match=r"traffic.json is no account of messages"):
        cost_of(folder)
    assert cost_of_uploads(run) is None


def test_own_rows_cost_the_whole_run_and_the_others_the_uploads() -> None:
    rows = [*ROWS[:3], Row("DENSE ensemble", "ensemble", 63.0), ROWS[3]]
    rounds: list[dict[str, Any]] = [
        {"epoch": 1, "accuracy": 50.0, "mib_per_client": 7.0},
        {"epoch": 2, "accuracy": 61.5},
        {"note": "late"},
    ]

    points = points_of(METHODS["dense"], rows, rounds, Cost(three_phases()))

    whole = three_phases().mib_per_client
    assert {point.name: point.cost for point in points} == {
        "FedAvg (one shot)": 5.0, "FedENS": 5.0, "DENSE ensemble": whole, "DENSE": whole,
    }  # fmt: skip
    # What rounds with the clients train is the ensemble, where there is one.
    assert {point.name: point.curves for point in points if point.curves} == {"DENSE ensemble": (((7.0, 50.0),),)}
    (student,) = points_of(METHODS["dense"], [ROWS[3]], rounds, Cost(three_phases()))
    assert student.curves == (((7.0, 50.0),),)


def test_an_ensemble_scored_without_its_quantisation_cost_the_whole_run_as_well() -> None:
    rows = [ROWS[1], Row("FENS, members in float32", "ensemble", 63.0), Row("FENS", "ensemble", 62.0)]

    points = points_of(METHODS["fens"], rows, [{"accuracy": 50.0, "mib_per_client": 7.0}], Cost(three_phases()))

    whole = three_phases().mib_per_client
    assert [point.cost for point in points] == [5.0, whole, whole]
    assert [bool(point.curves) for point in points] == [False, False, True]


def test_rows_without_uploads_to_be_made_of_are_left_out() -> None:
    traffic = Traffic()
    traffic.add("rounds", "alice", up=MIB)

    points = points_of(METHODS["dense"], ROWS, [], Cost(traffic))

    assert [(point.name, point.cost) for point in points] == [("DENSE", 1.0)]


def test_a_curve_is_made_of_rows_that_tell_bytes_and_accuracy() -> None:
    rows: list[dict[str, Any]] = [
        {"epoch": 1, "accuracy": 0.0, "mib_per_client": 1.0},
        {"epoch": 2, "mib_per_client": 2.0},
        {"epoch": 3, "accuracy": None, "mib_per_client": 3.0},
        {"epoch": 4, "accuracy": 9.0, "mib_per_client": 0.0},  # has no place on a logarithmic axis
        {"epoch": 5, "accuracy": 10.0, "mib_per_client": 5.0},
    ]

    own = Cost(three_phases()).as_json()
    assert curve_of(rows, own) == ((1.0, 0.0), (5.0, 10.0))
    # On the uploads of another run, what these cost comes before.
    assert curve_of(rows, {**own, "counted": "source"}) == ((6.0, 0.0), (10.0, 10.0))


def test_several_phases_when_printed_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    cost = Cost(three_phases()).as_json()
    result = {**cost["total"], "communication": cost}

    assert moved_lines(result) == [
        "4.5 MiB up, 5.5 MiB down per client",
        "upload: 4.0 MiB up, 1.0 MiB down",
        "aggregator: 512.0 KiB up, 512.0 KiB down",
        "ensemble: 256 B up, 4.0 MiB down",
    ]


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (246_184, "240.4 KiB"),
        (2**20, "1.0 MiB"),
        (44_700_000, "42.6 MiB"),
    ],
)
def test_an_amount_of_bytes_is_shown_in_a_unit_that_shows_it(amount: int, text: str) -> None:
    mib = round(amount / 2**20, 6)

    assert moved_lines({"mib_up_per_client": mib, "mib_down_per_client": mib}) == [f"{text} up, {text} down per client"]


def test_the_printed_result_of_a_run_with_phases_has_them_under_the_bytes(run_folder: MakeRun) -> None:
    cost = Cost(three_phases()).as_json()
    run = run_folder()
    result = {
        "status": "finished", "run_dir": str(run), "method": "fedens", "seed": 0, "table": [], "uploads": 3,
        "refused": 0, "refusals": [], **cost["total"], "communication": cost, "seconds": {"server": 1.0},
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))

    ended = CliRunner().invoke(command_line.cli, ["resume", str(run)])

    assert (
        "moved        4.5 MiB up, 5.5 MiB down per client\n             upload: 4.0 MiB up, 1.0 MiB down\n"
        in ended.output
    )
