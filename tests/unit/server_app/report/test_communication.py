from __future__ import annotations

import pytest
from commands import MakeRun, replayed

from server_app.report.communication import Cost, cost_of, cost_of_uploads, moved_in, moved_lines
from strategies.core.durable import MIB
from strategies.core.errors import StoreError
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder
from strategies.run.traffic import Traffic


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
    traffic.save()

    result = replayed(run, "fedens")

    assert (result["mib_up_per_client"], result["mib_down_per_client"]) == (0.0, 0.0)
    cost = result["communication"]
    assert cost["counted"] == "source"
    # The ensemble that the source run sent to its clients is none of this method's cost.
    assert list(cost["phases"]) == ["upload"]
    assert cost["total"]["mib_up"] * MIB == pytest.approx(3003, abs=2)
    assert cost["total"]["mib_down_per_client"] * MIB == pytest.approx(150, abs=1)
    assert moved_lines(result) == ["0 B up, 0 B down per client; the uploads cost 1001 B up, 150 B down"]


def test_a_damaged_account_is_one_line(run_folder: MakeRun) -> None:
    run = run_folder()
    write_json(run / "traffic.json", {"phases": 3})

    with RunFolder.open(run) as folder, pytest.raises(StoreError, match=r"traffic.json is not an account of messages"):
        cost_of(folder)
    assert cost_of_uploads(run) is None


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
