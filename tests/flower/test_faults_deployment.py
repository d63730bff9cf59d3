"""One run of a deployment whose plugs are pulled one after the other; `make soak` mixes all of them by chance."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from plugs import kill, plugged_in, result_of, uploads_in

from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run

pytestmark = [pytest.mark.slow, pytest.mark.check, pytest.mark.usefixtures("without_plots")]

CLIENTS = 2
SETTINGS = (
    "method='dense' server.epochs=60 server.generator-steps=4 server.steps-per-epoch=4 server.synthesis-batch-size=32 "
    f"client.epochs=40 data.image-size=8 threads=1 deadline-s=400 min-uploads={CLIENTS} checkpoint-s=0.0 "
    "compute='in-process'"
)


def test_run_whose_plugs_are_pulled_one_after_the_other_ends_with_the_bits_of_its_uploads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    resumed = str(run / "resume.toml")
    with plugged_in(tmp_path, CLIENTS) as here:
        # A node's machine dies while it trains: it comes back under another id and is asked again.
        here.submit(f"{SETTINGS} run-dir='{run}'")
        here.until(lambda: here.trainings()[0])
        here.kill_node(0)
        here.start_node(0)

        # The SuperLink's machine dies, with the ServerApp that collects on it.
        here.until(lambda: uploads_in(run))
        here.kill_superlink()
        held = uploads_in(run)
        here.start_superlink()
        here.submit(resumed)

        # And the ServerApp in the server stage.
        here.until(lambda: here.server_app() and (run / "checkpoint" / "checkpoint.json").exists())
        assert kill(here.server_app())
        here.submit(resumed)
        here.until(lambda: (result_of(run) or {}).get("status") == "finished")
        trainings = here.trainings()

    result = result_of(run) or {}
    uploads = uploads_in(run)
    assert held.items() <= uploads.items()
    assert sorted(uploads) == [f"client-{n:03d}" for n in range(CLIENTS)]
    for client, sha in uploads.items():
        assert hashlib.sha256((run / "uploads" / f"{client}.safetensors").read_bytes()).hexdigest() == sha
    assert trainings[1] == 1, "a client trained twice"
    assert trainings[0] <= 2, "a client trained again what it had kept"
    assert result["resumed_at"] > 0

    replay = replay_run(ReplayRequest(run, "dense", {}, folder=tmp_path / "replay"), log=lambda _: None)
    assert replay["weights_sha256"] == result["weights_sha256"]
