"""LoRA adapters as one: each case beside the same sum by full matrices, and beside what PEFT loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strategies.core.vision  # noqa: F401  before transformers, which imports torchvision
from strategies import SharedBase, merge
from strategies.core.errors import OptionError, UploadError
from strategies.merging.adapters import MergedAdapter
from strategies.merging.merge import Result
from strategies.method import METHODS
from strategies.methods.fens import FensConfig
from strategies.methods.tally import TallyConfig
from strategies.weights.adapters import Adapter
from strategies.weights.lora import LowRank, cut_rank, merge_aligned, stack_updates

peft = pytest.importorskip("peft")


class Net(nn.Module):
    """Layers of every kind that takes a low-rank update, a head and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 8)
        self.square = nn.Linear(8, 8)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.point = nn.Conv2d(4, 1, 1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.square(torch.relu(self.first(self.embed(tokens).mean(1))))
        found = self.point(self.conv(found[:, None])[:, :, None])[:, 0, 0] + self.norm(found)
        return self.head(found)


DENSE = ["embed", "first", "square", "conv", "point"]


def make_base(seed: int = 0, build: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def train(base: nn.Module, seed: int, **config: Any) -> Any:
    """Return a PEFT model whose adapter has other values than at its start."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config))
    for value in model.parameters():
        if value.requires_grad:
            value.data += 0.3 * torch.randn_like(value)
    return model.eval()


def save(model: Any, place: Path) -> Path:
    model.save_pretrained(place, save_embedding_layers=False)
    return place


def save_all(models: list[Any], place: Path) -> dict[str, Path]:
    """Save the models of clients, and return their folders by name."""
    return {str(k): save(model, place / str(k)) for k, model in enumerate(models)}


def full(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model whose adapter PEFT has merged, by the base's names."""
    return dict(copy.deepcopy(model).merge_and_unload(safe_merge=True).state_dict())


def merge_folders(
    folders: Mapping[str, Path], method: str = "fedavg", weights: Mapping[str, int] | None = None, **given: Any
) -> MergedAdapter:
    config = METHODS[method].config(**given.pop("options", {}))
    result = merge(folders, method, num_examples=weights, config=config, log=lambda _: None, **given).adapter
    assert result is not None
    return result


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name].double(), wanted[name].double(), atol=tolerance, rtol=tolerance, msg=name
        )


def check(base: nn.Module, models: list[Any], weights: list[int], place: Path, **given: Any) -> MergedAdapter:
    """Merge saved adapters, and compare the result, loaded by PEFT and added to the base, with full matrices."""
    folders = save_all(models, place)
    merged = merge_folders(folders, weights=dict(zip(folders, weights, strict=True)), start=base, **given)
    states = [full(model) for model in models]
    total = sum(weights)
    wanted = {
        key: sum(w * state[key].double() for w, state in zip(weights, states, strict=True)) / total for key in states[0]
    }
    merged.save(place / "merged")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), place / "merged")
    close(full(loaded), wanted)
    state, lost = merged.added_to_base()
    close(state, wanted)
    assert lost < 1e-6
    return merged


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param([{"r": 2, "lora_alpha": 8}, {"r": 4, "lora_alpha": 6, "use_rslora": True}], id="ranks and scales"),
        pytest.param([{"r": 8, "lora_alpha": 4}], id="r equals out"),
        pytest.param(
            [{"r": 2, "rank_pattern": {"square": 3, "^first": 1}, "alpha_pattern": {"first": 5}}, {"r": 2}],
            id="patterns",
        ),
        pytest.param([{"r": 2, "modules_to_save": ["head"]}, {"r": 1}], id="a head of one client"),
        pytest.param([{"r": 1, "bias": "all"}, {"r": 2, "bias": "lora_only"}], id="biases"),
        pytest.param(
            [{"r": 1, "trainable_token_indices": {"embed": rows}} for rows in ([1, 4], [4, 9])],
            id="rows of tokens",
        ),
    ],
)  # fmt: skip
def test_average_is_that_of_full_matrices(configs: list[dict[str, Any]], tmp_path: Path) -> None:
    """The embedding has an update only where no rows of it are trained; adding rows to the base is refused."""
    base = make_base()
    rows = "trainable_token_indices" in configs[0]
    targets = DENSE[1:] if rows else DENSE
    models = [train(base, k, target_modules=targets, **configs[k % len(configs)]) for k in range(3)]
    if not rows:
        check(base, models, [2, 6, 1], tmp_path)
        return
    merged = merge_folders(save_all(models, tmp_path), start=base)
    merged.save(tmp_path / "merged")
    loaded = full(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "merged"))
    close(loaded, {key: sum(full(model)[key] for model in models) / 3 for key in loaded})
    with pytest.raises(OptionError, match="rows of tokens"):
        merged.added_to_base()


def test_order_of_clients_does_not_matter_and_equal_ones_give_their_update(tmp_path: Path) -> None:
    base = make_base()
    model = train(base, 0, r=2, target_modules=DENSE)
    check(base, [model] * 3, [1, 2, 4], tmp_path / "equal")
    other = train(base, 1, r=1, target_modules=DENSE)
    folders = {"a": save(model, tmp_path / "a"), "b": save(other, tmp_path / "b")}
    one = merge_folders(folders, weights={"a": 1, "b": 3}, start=base).added_to_base()[0]
    two = merge_folders(dict(reversed(folders.items())), weights={"b": 3, "a": 1}, start=base).added_to_base()[0]
    close(one, two)


def test_rows_of_the_head_weigh_by_the_examples_of_their_class(tmp_path: Path) -> None:
    """Where label counts are known; a class that nobody has is averaged by the clients' sizes."""
    base = make_base()
    models = [train(base, k, r=1, target_modules=["first"], modules_to_save=["head"]) for k in range(2)]
    folders = [save(model, tmp_path / str(k)) for k, model in enumerate(models)]
    counts = [[6, 0, 0], [2, 2, 0]]
    merged = merge(folders, "fedavg", num_classes=3, input_shape=(1, 1, 4), label_counts=counts, log=str).adapter
    weights = torch.tensor([[0.75, 0.0, 0.6], [0.25, 1.0, 0.4]], dtype=torch.float64)
    states = [full(model) for model in models]
    for part, shape in (("weight", (2, 3, 1)), ("bias", (2, 3))):
        heads = torch.stack([state[f"head.{part}"].double() for state in states])
        found = merged.adapter.tensors[f"base_model.model.head.{part}"].double()
        torch.testing.assert_close(found, (weights.reshape(shape) * heads).sum(0), atol=1e-6, rtol=0)


def test_cut_of_the_rank_is_the_best_one_and_says_what_it_loses(tmp_path: Path) -> None:
    base = make_base()
    models = [train(base, k, r=2, target_modules=["square"]) for k in range(3)]
    folders = save_all(models, tmp_path)
    merged = merge_folders(folders, start=base).cut(2)
    exact = sum(full(model)["square.weight"].double() for model in models) / 3 - base.square.weight.detach().double()
    u, s, vh = torch.linalg.svd(exact)
    best = (u[:, :2] * s[:2]) @ vh[:2]
    found = merged.added_to_base()[0]["square.weight"] - base.square.weight.detach()
    torch.testing.assert_close(found.double(), best, atol=1e-6, rtol=1e-6)
    assert merged.lost_share == pytest.approx(float(s[2:].norm() / s.norm()), rel=1e-6)
    assert merge_folders(folders, start=base).lost_share == 0.0


def test_gpt2_layers_lie_as_inputs_by_outputs_square_ones_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=13, n_positions=8)
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(config)
    models = [train(base, k, r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True) for k in range(2)]
    check(base, models, [1, 1], tmp_path)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 6))
        self.down = nn.Parameter(torch.randn(3, 6, 5))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio,eoj->bj", x, self.experts.up, self.experts.down)


def test_experts_are_merged_matrix_by_matrix(tmp_path: Path) -> None:
    base = make_base(0, Mixture)
    targets = {"target_modules": [], "target_parameters": ["experts.up", "experts.down"]}
    models = [train(base, k, r=rank, lora_alpha=3, **targets) for k, rank in enumerate((1, 2))]
    check(base, models, [1, 3], tmp_path)


def test_second_round_keeps_to_the_start(tmp_path: Path) -> None:
    """A rule sees the difference to the adapter that all clients started from, and the mean is that of the clients."""
    base = make_base()
    shared = {"r": 2, "target_modules": ["first", "square"], "modules_to_save": ["head"]}
    start = train(base, 7, **shared)
    clients = [copy.deepcopy(start) for _ in range(2)]
    for k, client in enumerate(clients):
        torch.manual_seed(k)
        for value in client.parameters():
            value.data += 0.1 * value.requires_grad * torch.randn_like(value)
    folders = save_all(clients, tmp_path)
    begun, ends = full(start), [full(client) for client in clients]
    same = {key: (ends[0][key] + ends[1][key]) / 2 for key in begun}
    for method, scale, wanted in (
        ("task-arithmetic", 1.0, same),
        ("task-arithmetic", 0.5, {key: (begun[key] + same[key]) / 2 for key in begun}),
        ("dare", 1.0, same),  # which drops nothing
    ):
        options = {"scaling": scale, **({"drop": 0.0} if method == "dare" else {})}
        merged = merge_folders(folders, method, start=save(start, tmp_path / "start"), options=options)
        merged.save(tmp_path / "merged")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "merged")
        close(full(loaded), wanted, 2e-6)


@pytest.mark.parametrize("method", ["ties", "tsv", "knots"])
def test_rules_see_full_updates(method: str, tmp_path: Path) -> None:
    """Of K equal adapters TIES keeps the largest entries of their update, and the others all of it."""
    base = make_base()
    model = train(base, 0, r=4, target_modules=["square"])  # both together have the full rank, which loses nothing
    folders = save_all([model] * 2, tmp_path)
    wanted = full(model)["square.weight"] - base.square.weight.detach()
    if method == "ties":
        wanted = wanted * (wanted.abs() >= wanted.abs().flatten().sort(descending=True).values[12])  # 0.2 of 64: 13
    options = {"density": 1.0, "aligned": True} if method == "knots" else {}
    merged = merge_folders(folders, "ties" if method == "knots" else method, start=base, options=options)
    state, _ = merged.added_to_base()
    torch.testing.assert_close(state["square.weight"] - base.square.weight.detach(), wanted, atol=2e-6, rtol=0)
    assert merged.lost_share < 1e-6


def test_bfloat16_base_is_rounded_once_and_the_loss_is_told(tmp_path: Path) -> None:
    base = make_base().to(torch.bfloat16)
    models = [train(base, k, r=1, lora_alpha=0.01, target_modules=["square"]) for k in range(2)]
    folders = save_all(models, tmp_path)
    merged = merge_folders(folders, start=base)
    rounded, lost = merged.added_to_base()
    exact, nothing = merged.added_to_base(torch.float32)
    assert rounded["square.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(rounded["square.weight"], exact["square.weight"].bfloat16(), atol=0, rtol=0)
    update = exact["square.weight"] - base.square.weight.detach()
    assert lost == pytest.approx(
        float((rounded["square.weight"] - exact["square.weight"]).norm() / update.norm()), rel=1e-3
    )
    assert lost > 0.1 > 1e-5 > nothing


def edit(folder: Path, **config: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file({change(key): value for key, value in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 3}, "rank"),
        ({"rank_pattern": {"(a+)+": 2}}, "rank_pattern"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"base_model_name_or_path": "other"}, "base"),
        ({"task_type": "CAUSAL_LM"}, "task_type"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(config: dict[str, Any], line: str, tmp_path: Path) -> None:
    base = make_base()
    folders = save_all([train(base, k, r=2, target_modules=["first"]) for k in range(2)], tmp_path)
    edit(tmp_path / "0", base_model_name_or_path="base")
    edit(tmp_path / "1", **config)
    with pytest.raises(UploadError, match=line):
        merge_folders(folders)


def test_grouped_convolutions_are_refused(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    place = save(train(base, 0, r=2, target_modules=["0"]), tmp_path)
    with pytest.raises(UploadError, match="grouped"):
        merge_folders({"a": place})


def test_names_of_wrapped_models_are_cleaned(tmp_path: Path) -> None:
    base = make_base()
    models = [train(base, k, r=2, target_modules=DENSE) for k in range(2)]
    folders = save_all(models, tmp_path)
    plain = merge_folders(folders).adapter.tensors
    rename(tmp_path / "0", lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."))
    rename(tmp_path / "1", lambda key: key.removeprefix("base_model.model."))
    close(merge_folders(folders).adapter.tensors, plain, 0)
    rename(tmp_path / "1", lambda key: key.replace("square", "circle"))
    with pytest.raises(UploadError, match=r"circle, square|square, circle|different in"):
        merge_folders(folders)


@pytest.mark.parametrize("method", ["fedavg", "ties"])
def test_models_of_peft_in_memory_merge_as_their_folders(method: str, tmp_path: Path) -> None:
    base = make_base()
    first = train(base, 1, r=2, target_modules=DENSE, modules_to_save=["head"])
    second = train(base, 2, r=3, lora_alpha=5, target_modules=DENSE, bias="all")
    wanted = merge_folders({"a": save(first, tmp_path / "a"), "b": save(second, tmp_path / "b")}, method, start=base)
    given: Any = {"a": first, "b": nn.DataParallel(second)}
    close(merge_folders(given, method, start=base).added_to_base()[0], wanted.added_to_base()[0])
    first.add_adapter("other", peft.LoraConfig(r=1, target_modules=["first"]))
    with pytest.raises(OptionError, match=r"adapters default, other: must hold one"):
        merge_folders({"a": first}, method, start=base)


@pytest.mark.parametrize("method", ["fedavg", "ties"])
@pytest.mark.parametrize(
    "build",
    [
        lambda base: train(base, 1, r=2, target_modules=["first"]).state_dict(),
        *(
            lambda base, kind=kind: peft.get_peft_model_state_dict(
                peft.get_peft_model(copy.deepcopy(base), getattr(peft, kind)(target_modules=["first"]))
            )
            for kind in ("VeraConfig", "LoHaConfig", "LoKrConfig")
        ),
        lambda base: {"first.lora_A": torch.ones(2, 6), "first.lora_B": torch.ones(8, 2)},
    ],
    ids=["whole-model", "vera", "loha", "lokr", "loralib"],
)
def test_factors_in_another_form_are_not_averaged_one_by_one(build: Callable[[nn.Module], Any], method: str) -> None:
    state = build(make_base())
    with pytest.raises(OptionError, match=r"is a factor of an update, .*must be a LoRA adapter as PEFT saves it"):
        merge([state, state], method, start=state, log=lambda _: None)


def test_a_base_without_the_head_that_clients_trained_is_refused(tmp_path: Path) -> None:
    base = make_base()
    place = save(train(base, 1, r=2, target_modules=["first"], modules_to_save=["head"]), tmp_path / "a")
    body = {name: value for name, value in base.state_dict().items() if not name.startswith("head")}
    with pytest.raises(OptionError, match=r"the base has no 'head\.\w+', which the clients trained: start= must be"):
        merge_folders({"a": place}, start=body).added_to_base()


def test_one_base_in_several_places_is_one_base(tmp_path: Path) -> None:
    cache = "models--some--Tiny/snapshots/0123abcd"
    folders = save_all([train(make_base(), k, r=2, target_modules=["first"]) for k in range(3)], tmp_path)
    for folder, place in zip(folders.values(), ["some/Tiny", f"hub/{cache}", "D:\\models\\Tiny\\"], strict=True):
        edit(folder, base_model_name_or_path=place)
    assert merge_folders(folders).lost_share == 0.0


def test_another_base_is_refused(tmp_path: Path) -> None:
    """A merged adapter names its base by the digest of the weights it changes; precision is part of it."""
    base, other = make_base(0), make_base(1)
    folders = save_all([train(base, k, r=2, target_modules=["first"]) for k in range(2)], tmp_path)
    merge_folders(folders, start=base).save(tmp_path / "merged")
    again = {"merged": tmp_path / "merged", "2": save(train(base, 2, r=2, target_modules=["first"]), tmp_path / "2")}
    merge_folders(again, start=base)
    state = base.state_dict()
    quantised = {**state, "first.weight": (20 * state["first.weight"]).to(torch.int8)}
    for wrong in (other, make_base(0).half(), quantised):
        with pytest.raises(UploadError, match="sha256"):
            merge_folders(again, start=wrong)
    packed = {**state, "first.weight": torch.zeros(24, 1, dtype=torch.uint8)}  # two weights of 4 bits in a byte
    with pytest.raises(UploadError, match=r"\[8, 6\] and the base has .*\[24, 1\]"):
        merge_folders(again, start=packed)
    with pytest.raises(UploadError, match="no such layer"):
        merge_folders(folders, start=nn.Sequential(nn.Linear(2, 2))).added_to_base()


@pytest.mark.parametrize("config", [{"target_modules": ["embed"]}, {"modules_to_save": ["embed"]}])
def test_vocabularies_of_other_sizes_are_refused_with_both(config: dict[str, Any], tmp_path: Path) -> None:
    longer = make_base()
    longer.embed = nn.Embedding(12, 6)
    config = {"target_modules": ["first"], "r": 2, **config}
    folders = save_all([train(base, k, **config) for k, base in enumerate((make_base(), longer))], tmp_path)
    with pytest.raises(UploadError, match=r"embed.* \[(6, )?11(, 6)?\] and \[(6, )?12(, 6)?\]: must have one size"):
        merge_folders(folders)


def test_an_adapter_is_a_copy_of_what_training_goes_on_with() -> None:
    model = train(make_base(), 0, r=2, target_modules=["first"])
    reply = peft.get_peft_model_state_dict(model)  # the live weights
    adapter = Adapter.of_state("a", reply)
    kept = {key: value.clone() for key, value in reply.items()}
    for value in model.parameters():
        value.data.zero_()
    assert not any(bool(value.any()) for value in reply.values())
    close(adapter.tensors, kept, 0)


def test_tied_weights_are_not_added_to(tmp_path: Path) -> None:
    base = make_base()
    base.head = nn.Linear(6, 11, bias=False)
    base.head.weight = base.embed.weight
    place = save(train(base, 0, r=2, target_modules=["embed"]), tmp_path)
    with pytest.raises(OptionError, match="shared"):
        merge_folders({"a": place}, start=base).added_to_base()


def test_base_is_read_from_a_folder_and_written_to_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    base: Any = make_base(0, make_text_classifier)
    base.save_pretrained(tmp_path / "base")
    model = train(base, 0, r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    merged = merge_folders({"a": save(model, tmp_path / "a")}, start=tmp_path / "base")
    assert merged.save_model(tmp_path / "whole") < 1e-6
    whole = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    tokens = torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(whole(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)


def make_text_classifier() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=13, num_labels=3
    )
    return transformers.BertForSequenceClassification(config).eval()


def make_image_classifier() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


@dataclass
class Clients:
    """Three clients whose classifiers are adapters on one base, and examples of theirs."""

    base: nn.Module
    models: list[Any]
    folders: list[Path]
    build: SharedBase
    shape: tuple[int, int, int]
    examples: Tensor

    def merge(self, method: str, **given: Any) -> Result:
        counts = [[4, 0, 1], [1, 2, 3], [0, 9, 1]]
        shared: dict[str, Any] = {"model": self.build, "num_classes": 3, "input_shape": self.shape, "log": str}
        return merge(self.folders, method, label_counts=counts, **shared, **given)


def make_clients(place: Path, *, images: bool) -> Clients:
    base = make_base(0, make_image_classifier if images else make_text_classifier)
    shared: dict[str, Any] = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
    shared = {"target_modules": ["1"], "modules_to_save": ["3"]} if images else shared
    models = [train(base, k, r=rank, lora_alpha=4 + k, **shared) for k, rank in enumerate((2, 1, 2))]
    folders = [save(model, place / str(k)) for k, model in enumerate(models)]
    build = SharedBase(peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, lora_alpha=8, **shared)))
    shape = (1, 8, 8) if images else (1, 1, 6)
    made = torch.Generator().manual_seed(0)
    x = torch.randn(5, *shape, generator=made) if images else torch.randint(1, 13, (5, *shape), generator=made)
    return Clients(base, models, folders, build, shape, x)


@pytest.mark.parametrize("images", [False, True])
def test_a_merged_adapter_answers_on_the_shared_base_as_peft_loads_it(images: bool, tmp_path: Path) -> None:
    """Its rank is the sum of the clients', above that of the base's own adapter."""
    clients = make_clients(tmp_path, images=images)
    result = clients.merge("fedavg")
    result.save(tmp_path / "merged")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(clients.base), tmp_path / "merged")
    x = clients.examples
    wanted = loaded(x) if images else loaded(input_ids=x.flatten(1)).logits
    torch.testing.assert_close(result.student(x), wanted, atol=1e-5, rtol=0)
    scores = result.evaluate([(x, torch.zeros(5))])["student"]
    assert scores["accuracy"] == pytest.approx(100 * float((wanted.argmax(1) == 0).float().mean()))


def test_fens_trains_its_aggregator_on_adapters_that_share_a_base(tmp_path: Path) -> None:
    """Classes in another order than the members': only a trained aggregator finds it."""
    clients = make_clients(tmp_path, images=False)
    texts = torch.randint(1, 13, (90, *clients.shape), generator=torch.Generator().manual_seed(1))
    labels = (clients.models[1](input_ids=texts.flatten(1)).logits.argmax(1) + 1) % 3
    found = clients.merge("fens", labelled=(texts, labels), config=FensConfig(rounds=60, server_lr=0.05))
    mean = clients.merge("fedens")
    scores = [one.evaluate([(texts, labels)])["ensemble"]["accuracy"] for one in (found, mean)]
    assert scores[1] < 40
    assert scores[0] > 60


def test_tally_distils_adapters_for_images_into_the_base_with_one_adapter(tmp_path: Path) -> None:
    clients = make_clients(tmp_path, images=True)
    result = clients.merge("tally", config=TallyConfig(epochs=20, images=1024, start="fresh", student_lr=0.02))
    assert result.student.state_dict().keys() == clients.build().state_dict().keys()
    noise = torch.randn(200, *clients.shape, generator=torch.Generator().manual_seed(2))
    taught, before = (
        float((model(noise).argmax(1) == result.ensemble(noise).argmax(1)).float().mean())
        for model in (result.student, clients.build())
    )
    assert taught > before + 0.1
    with pytest.raises(OptionError, match=r"'tally.start' is 'class-weighted'.*no average: must be 'fresh'"):
        clients.merge("tally")


@pytest.mark.parametrize(("method", "images"), [("fedens", False), ("label-count-ensemble", False), ("fedens", True)])
def test_ensembles_hold_the_base_once(method: str, images: bool, tmp_path: Path) -> None:
    """Members answer as PEFT's own models do, also of lower ranks and other scales; they hold their adapters alone."""
    clients = make_clients(tmp_path, images=images)
    result = clients.merge(method)
    x, models, build = clients.examples, clients.models, clients.build
    wanted = torch.stack([model(x) if images else model(input_ids=x.flatten(1)).logits for model in models])
    torch.testing.assert_close(result.ensemble.member_logits(x), wanted, atol=1e-5, rtol=0)
    if method == "fedens":
        torch.testing.assert_close(result.ensemble(x), wanted.mean(0), atol=1e-5, rtol=0)
    held = sum(value.numel() for member in result.ensemble.members for value in member.parameters())
    assert held == 3 * sum(value.numel() for value in build.adapter.tensors.values())


# The arithmetic itself.


def draw(*ranks: int, out: int = 7, inside: int = 5) -> list[LowRank]:
    made = torch.Generator().manual_seed(0)
    return [
        LowRank(torch.randn(out, r, generator=made).double(), torch.randn(r, inside, generator=made).double())
        for r in ranks
    ]


def test_aligned_mean_is_the_mean_of_small_updates_too() -> None:
    """No direction of an update that is small as a whole is taken for rounding."""
    updates = [LowRank(1e-9 * each.left, each.right) for each in draw(2, 3)]
    weights = [0.25, 0.75]
    found = merge_aligned(updates, lambda parts: weights[0] * parts[0] + weights[1] * parts[1]).dense()
    wanted = stack_updates(updates, weights).dense()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-12


def test_cut_to_the_own_rank_loses_nothing() -> None:
    stacked = stack_updates([*draw(3), *draw(3)], [1.0, 2.0])
    kept, lost = cut_rank(stacked, 3)
    assert lost < 1e-7
    torch.testing.assert_close(kept.dense(), stacked.dense(), atol=1e-13, rtol=0)
