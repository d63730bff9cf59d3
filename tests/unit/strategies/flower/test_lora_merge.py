"""LoRAMerge in an app of the form of Flower's fine-tuning apps: a causal language model, PEFT, a trainer of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, Result

import strategies.core.vision  # noqa: F401  before transformers, which imports torchvision
from strategies import TIES, LoRAMerge, OneShotFedAvg, SharedBase, simulate
from strategies.core.errors import OptionError, QuorumError
from strategies.methods.ties import TiesConfig
from strategies.weights.rules import ties

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LORA = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
LAYER = "model.layers.0.self_attn.q_proj.weight"


def get_model() -> Any:
    """Return the base with a fresh adapter, the same at the server and at every client."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), LORA)


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = get_model()
    peft.set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    part = int(context.node_config["partition-id"])
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(part))
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = peft.get_peft_model_state_dict(model)
    if part == int(context.run_config.get("broken", -1)):
        state = {key: torch.full_like(value, torch.nan) for key, value in state.items()}
    seen[part] = copy.deepcopy(state)
    if part == int(context.run_config.get("wrapped", -1)):
        state = {f"module._orig_mod.{key}": value for key, value in state.items()}
    arrays = ArrayRecord(state)
    if part == int(context.run_config.get("listed", -1)):
        arrays = ArrayRecord([value.numpy() for value in state.values()])
    for value in model.parameters():
        value.data.zero_()  # what the reply's arrays share with it would be lost
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": 10 * (part + 1)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


seen: dict[int, dict[str, torch.Tensor]] = {}  # the last replies, by part


def run(make: Callable[[], FedAvg], rounds: int = 1, **config: Any) -> Result:
    """Run the app with a strategy, and keep the clients' replies in ``seen``."""
    found: list[Result] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = make()
        arrays = ArrayRecord(peft.get_peft_model_state_dict(get_model()))
        found.append(
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.05}))
        )

    seen.clear()
    simulate(server, app, clients=3, run_config=config)
    return found[0]


def weight(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the layer's weight with an adapter, as PEFT merges it."""
    model = get_model()
    peft.set_peft_model_state_dict(model, state)
    return model.merge_and_unload().state_dict()[LAYER].double()


def base_weight() -> torch.Tensor:
    """Return the layer's weight without an adapter."""
    state: dict[str, torch.Tensor] = get_model().get_base_model().state_dict()
    return state[LAYER.replace("q_proj", "q_proj.base_layer")].double()


def of_rank_two(update: torch.Tensor) -> torch.Tensor:
    """Return the best approximation of the adapters' rank."""
    u, s, vh = torch.linalg.svd(update)
    return (u[:, :2] * s[:2]) @ vh[:2]


def strategy(rule: str = "average", **given: Any) -> Callable[[], FedAvg]:
    return lambda: LoRAMerge(rule, fraction_evaluate=0.0, **given)


def test_average_of_a_fine_tuning_app_is_the_exact_one(tmp_path: Path) -> None:
    """In the folder exactly; in the round's arrays, whose rank the app's model fixes, the best of this rank."""
    result = run(strategy(folder=tmp_path, peft_config=LORA))
    base = base_weight()
    wanted = sum(weight(seen[part]) * (part + 1) / 6 for part in seen)
    loaded = peft.PeftModel.from_pretrained(get_model().unload(), tmp_path)
    torch.testing.assert_close(loaded.merge_and_unload().state_dict()[LAYER].double(), wanted, atol=1e-6, rtol=0)
    best = of_rank_two(wanted - base)
    found = weight(result.arrays.to_torch_state_dict()) - base
    torch.testing.assert_close(found, best, atol=1e-6, rtol=0)
    assert 0.0 < float(result.train_metrics_clientapp[1]["lost-share"]) < 1.0  # type: ignore[arg-type]
    without = run(strategy(), wrapped=1)
    torch.testing.assert_close(weight(without.arrays.to_torch_state_dict()) - base, best, atol=1e-6, rtol=0)
    assert without.train_metrics_clientapp[1]["lost-share"] == pytest.approx(
        result.train_metrics_clientapp[1]["lost-share"], rel=1e-3
    )


def test_other_rules_see_the_updates() -> None:
    result = run(strategy("ties", config=TiesConfig(density=0.5)))
    base = base_weight()
    wanted = ties([weight(state) - base for state in seen.values()], 0.5)
    found = weight(result.arrays.to_torch_state_dict()) - base
    torch.testing.assert_close(found, of_rank_two(wanted), atol=1e-5, rtol=0)


def test_rounds_continue_and_a_client_without_numbers_is_left_out() -> None:
    result = run(strategy(), rounds=2, broken=1)
    shapes = {key: value.shape for key, value in seen[0].items()}
    state = result.arrays.to_torch_state_dict()
    assert {key: value.shape for key, value in state.items()} == shapes
    assert all(bool(value.isfinite().all()) for value in state.values())
    wanted = 0.25 * weight(seen[0]) + 0.75 * weight(seen[2])
    base = base_weight()
    torch.testing.assert_close(weight(state) - base, of_rank_two(wanted - base), atol=1e-6, rtol=0)


def test_lists_of_arrays_are_refused_because_factors_are_known_by_their_names(tmp_path: Path) -> None:
    """A file of safetensors has another order than a state dict, and A and B of many layers have one shape."""
    shared = SharedBase(get_model())
    result = run(lambda: OneShotFedAvg(shared, run_dir=tmp_path / "run", compute="in-process"), listed=1)  # type: ignore[arg-type]
    base = base_weight()
    wanted = of_rank_two(0.25 * weight(seen[0]) + 0.75 * weight(seen[2]) - base)
    torch.testing.assert_close(weight(result.arrays.to_torch_state_dict()) - base, wanted, atol=1e-5, rtol=0)
    with pytest.raises(InconsistentMessageReplies, match="same keys"):
        run(strategy(), listed=1)
    seen.clear()
    listed = ArrayRecord([value.numpy() for value in peft.get_peft_model_state_dict(get_model()).values()])
    with pytest.raises(OptionError, match=r"initial_arrays do not fit.*not expected 0, 1"):
        OneShotFedAvg(shared, run_dir=tmp_path / "other").start(None, listed)  # type: ignore[arg-type]
    assert not seen


def test_one_shot_strategies_merge_adapters_and_replay_them(tmp_path: Path) -> None:
    """A run keeps the clients' adapters, which another rule merges later; results fit the model of the app."""
    shared = SharedBase(get_model())
    made = run(lambda: OneShotFedAvg(shared, run_dir=tmp_path / "run", compute="in-process"))  # type: ignore[arg-type]
    base = base_weight()
    mean = sum(weight(seen[part]) * (part + 1) / 6 for part in seen) - base
    replayed = TIES(shared, config=TiesConfig(density=0.5), compute="in-process").replay(
        tmp_path / "run", target=tmp_path / "ties"
    )
    elected = ties([weight(state) - base for state in seen.values()], 0.5)
    for state, wanted in ((made.arrays.to_torch_state_dict(), mean), (dict(replayed.state_dict()), elected)):
        torch.testing.assert_close(weight(state) - base, of_rank_two(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"rule": "fedens"}, "ties"),
        ({"folder": "x"}, "peft_config"),
        ({"run_dir": "x"}, "LoRAMerge does not take 'run_dir'"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_the_run(given: dict[str, str], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        LoRAMerge(**given)  # type: ignore[arg-type]


def test_a_run_of_whole_models_or_without_answers_ends_before_it_is_in_vain() -> None:
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    with pytest.raises(OptionError, match="hold no lora_A and lora_B: must be ArrayRecord"):
        LoRAMerge().configure_train(1, ArrayRecord({"head.weight": torch.zeros(2, 2)}), ConfigRecord(), None)  # type: ignore[arg-type]
    failed = Message(Error(2, "<class 'KeyError'>:<''fitins.parameters''>"), reply_to=message)
    with pytest.raises(QuorumError, match="no client sent an adapter: .*NumPyClient.*must be a ClientApp"):
        LoRAMerge().aggregate_train(1, [failed])


def test_factors_that_would_be_averaged_apart_are_refused_before_a_client_trains(tmp_path: Path) -> None:
    seen.clear()
    start = ArrayRecord(peft.get_peft_model_state_dict(get_model()))
    with pytest.raises(
        OptionError, match=r"LoRA factors.*must be SharedBase\(get_model\(\)\), or the strategy LoRAMerge"
    ):
        OneShotFedAvg(get_model, run_dir=tmp_path / "run").start(None, start)  # type: ignore[arg-type]
    assert not seen
