"""A checkpoint is resumed bitwise as if nothing had happened, or refused by the name of what is missing."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vantage.tasks.training.checkpoints import (
    IncompleteCheckpoint,
    Loaded,
    latest,
    load,
    module_tensors,
    optimizer_tensors,
    restore_module,
    restore_optimizer,
    save,
)

VOCABULARY, WIDTH, BATCH = 11, 6, 4
PARTS = {
    "policy.weights",
    "policy.optimizer",
    "critic.weights",
    "critic.optimizer",
    "random",
    "kl_coef",
    "position",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TiedModel(nn.Module):
    """A next-token model whose output shares its weights with the embedding, with a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixing = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_batches += 1
        hidden = torch.tanh(self.mixing(self.embedding(tokens)))
        return self.head(nn.functional.dropout(hidden, 0.1, self.training))


class Training:
    """A policy and a critic with an optimiser each, random numbers, a schedule, and a coefficient that changes."""

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.policy, self.critic = TiedModel(), nn.Linear(WIDTH, 1)
        decayed = [parameter for parameter in self.policy.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.policy.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.policy_optimizer = torch.optim.AdamW(groups, lr=1e-2, **options)
        self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), lr=3e-3, amsgrad=True)
        self.kl_coef, self.step = 0.05, 0

    def run(self, until: int) -> "Training":
        while self.step < until:
            for optimizer, peak in ((self.policy_optimizer, 1e-2), (self.critic_optimizer, 3e-3)):
                for group in optimizer.param_groups:
                    group["lr"] = peak * (1 + math.cos(math.pi * self.step / 10)) / 2
            tokens = torch.randint(VOCABULARY, (BATCH, 5))
            logits = self.policy(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            values = self.critic(self.policy.embedding(tokens).detach())
            for optimizer, objective in (
                (self.policy_optimizer, loss),
                (self.critic_optimizer, (values - self.kl_coef).square().mean()),
            ):
                optimizer.zero_grad()
                objective.backward()
                optimizer.step()
            self.kl_coef *= 1.1 + loss.item() / 7
            self.step += 1
        return self

    def save(self, folder: Path) -> None:
        save(
            folder,
            step=self.step,
            tensors={
                **module_tensors(self.policy, part="policy.weights"),
                **optimizer_tensors(
                    self.policy_optimizer, self.policy.named_parameters(), part="policy.optimizer"
                ),
                **module_tensors(self.critic, part="critic.weights"),
                **optimizer_tensors(
                    self.critic_optimizer, self.critic.named_parameters(), part="critic.optimizer"
                ),
                "random/torch": torch.get_rng_state(),
            },
            state={"kl_coef": self.kl_coef, "position": {"epoch": 0, "row": self.step * BATCH}},
        )

    def restore(self, folder: Path) -> "Training":
        loaded = load_latest(folder)
        restore_module(self.policy, loaded.tensors, part="policy.weights")
        restore_module(self.critic, loaded.tensors, part="critic.weights")
        restore_optimizer(
            self.policy_optimizer, self.policy.named_parameters(), loaded.tensors, part="policy.optimizer"
        )
        restore_optimizer(
            self.critic_optimizer, self.critic.named_parameters(), loaded.tensors, part="critic.optimizer"
        )
        torch.set_rng_state(loaded.tensors["random/torch"])
        self.kl_coef, self.step = loaded.state["kl_coef"], loaded.step
        return self

    def everything(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "policy_optimizer": self.policy_optimizer.state_dict()["state"],
            "critic_optimizer": self.critic_optimizer.state_dict()["state"],
            "rates": [group["lr"] for group in self.policy_optimizer.param_groups],
            "kl_coef": self.kl_coef,
            "random": torch.get_rng_state(),
        }


def load_latest(folder: Path, required: set[str] = PARTS) -> Loaded:
    checkpoint = latest(folder)
    assert checkpoint is not None
    return load(checkpoint, required=required)


def assert_same(one: Any, other: Any) -> None:
    """Assert equality to the last bit, in whatever values are nested."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": False, "amsgrad": True}],
)
@pytest.mark.parametrize("saved_at", [0, 1, 4])
def test_going_on_from_a_checkpoint_is_bitwise_going_on(
    tmp_path: Path, options: dict[str, bool], saved_at: int
) -> None:
    uninterrupted = Training(**options).run(9).everything()

    Training(**options).run(saved_at).save(tmp_path)
    resumed = Training(seed=99, **options)
    resumed.run(2)  # whatever stood there before is gone
    assert_same(resumed.restore(tmp_path).run(9).everything(), uninterrupted)
    assert resumed.policy.head.weight is resumed.policy.embedding.weight


def test_an_optimiser_may_compute_in_another_way_after(tmp_path: Path) -> None:
    Training(foreach=False).run(3).save(tmp_path)
    resumed = Training(foreach=True).restore(tmp_path)
    assert all(group["foreach"] for group in resumed.policy_optimizer.param_groups)
    assert_same(resumed.everything()["rates"], Training().run(3).everything()["rates"])


def test_tied_weights_are_written_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    training = Training().run(2)
    training.save(tmp_path)
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    header_size = int.from_bytes((checkpoint.folder / "tensors.safetensors").read_bytes()[:8], "little")
    written = json.loads((checkpoint.folder / "tensors.safetensors").read_bytes()[8 : 8 + header_size])
    assert len({"policy.weights/head.weight", "policy.weights/embedding.weight"} & written.keys()) == 1
    tensors = load_latest(tmp_path).tensors
    for name in ("head.weight", "embedding.weight"):
        assert torch.equal(tensors[f"policy.weights/{name}"], training.policy.embedding.weight)
    assert (
        tensors["policy.weights/head.weight"].data_ptr()
        != tensors["policy.weights/embedding.weight"].data_ptr()
    )


def test_views_of_one_memory_come_back_as_they_were(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    views = {
        "a/whole": whole,
        "a/row": whole[1],
        "a/transposed": whole.T,
        "a/again": whole[1],
        "a/none": whole[:0],
    }
    save(tmp_path, step=1, tensors=views, state={})
    assert_same(
        load_latest(tmp_path, {"a"}).tensors, {name: view.contiguous() for name, view in views.items()}
    )


def test_a_checkpoint_of_the_same_content_has_the_same_bytes(tmp_path: Path) -> None:
    training = Training().run(2)
    manifests = set()
    for number in range(5):
        training.save(tmp_path / str(number))
        manifests.add((tmp_path / str(number) / "checkpoint-00000002" / "manifest.json").read_bytes())
    assert len(manifests) == 1


@settings(max_examples=50)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_of_the_state_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, number: float
) -> None:
    folder = tmp_path_factory.mktemp("floats")
    save(folder, step=1, tensors={}, state={"kl_coef": number, "moments": [number, {"mean": number}]})
    state = load_latest(folder, {"kl_coef", "moments"}).state
    assert [state["kl_coef"], *state["moments"]] == [number, number, {"mean": number}]
    assert math.copysign(1, state["kl_coef"]) == math.copysign(1, number)


@pytest.mark.parametrize(
    "bad, message", [(math.inf, "state.best=inf is not JSON"), (torch.ones(1), "is a Tensor")]
)
def test_a_state_that_is_not_json_is_refused_and_nothing_is_written(
    tmp_path: Path, bad: Any, message: str
) -> None:
    save(tmp_path, step=1, tensors={}, state={"best": 1.0})
    with pytest.raises(ValueError, match=message):
        save(tmp_path, step=2, tensors={}, state={"best": bad})
    assert load_latest(tmp_path, {"best"}).state == {"best": 1.0}


def test_names_without_a_part_and_parts_that_clash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor 'weight' belongs to no part; name it 'part/name'"):
        save(tmp_path, step=1, tensors={"weight": torch.ones(1)}, state={})
    with pytest.raises(ValueError, match="best: both tensors and state have this part; rename one"):
        save(tmp_path, step=1, tensors={"best/weight": torch.ones(1)}, state={"best": 1})


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_missing_part_is_refused_by_its_name(tmp_path: Path, part: str) -> None:
    Training().run(1).save(tmp_path)
    whole = load_latest(tmp_path)
    tensors = {name: tensor for name, tensor in whole.tensors.items() if not name.startswith(f"{part}/")}
    save(
        tmp_path,
        step=2,
        tensors=tensors,
        state={name: whole.state[name] for name in set(whole.state) - {part}},
    )
    with pytest.raises(IncompleteCheckpoint, match=f": {part} is missing; it was saved by another version"):
        load_latest(tmp_path)


def test_a_part_that_nobody_asks_for_is_refused_by_its_name(tmp_path: Path) -> None:
    Training().run(1).save(tmp_path)
    with pytest.raises(
        IncompleteCheckpoint, match=r"critic\.optimizer is not expected, kl_coef is not expected"
    ):
        load_latest(tmp_path, PARTS - {"kl_coef", "critic.optimizer"})


def test_every_single_tensor_is_needed(tmp_path: Path) -> None:
    training = Training().run(2)
    training.save(tmp_path)
    tensors = load_latest(tmp_path).tensors
    before = copy.deepcopy(training.everything())
    for lost in [name for name in tensors if name.startswith("policy.")]:
        left = {name: tensor for name, tensor in tensors.items() if name != lost}
        with pytest.raises(IncompleteCheckpoint, match=r"is missing"):
            restore_module(training.policy, left, part="policy.weights")
            named = training.policy.named_parameters()
            restore_optimizer(training.policy_optimizer, named, left, part="policy.optimizer")
    assert_same(training.everything(), before)


@pytest.mark.parametrize(
    "part, name", [("policy.weights", "more"), ("policy.optimizer", "mixing.weight/more/exp")]
)
def test_a_tensor_that_fits_nothing_is_refused(tmp_path: Path, part: str, name: str) -> None:
    training = Training().run(2)
    training.save(tmp_path)
    tensors = {**load_latest(tmp_path).tensors, f"{part}/{name}": torch.ones(1)}
    with pytest.raises(IncompleteCheckpoint, match=f"{part}/{name} in the checkpoint fits nothing"):
        restore_module(training.policy, tensors, part="policy.weights")
        named = training.policy.named_parameters()
        restore_optimizer(training.policy_optimizer, named, tensors, part="policy.optimizer")


def test_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    training = Training().run(1)
    training.save(tmp_path)
    tensors = load_latest(tmp_path).tensors
    weight = "critic.weights/weight"
    with pytest.raises(
        IncompleteCheckpoint, match=r"weight is \(2, 6\) torch.float32 in the checkpoint, \(1, 6\)"
    ):
        restore_module(training.critic, {**tensors, weight: torch.ones(2, 6)}, part="critic.weights")
    with pytest.raises(IncompleteCheckpoint, match=r"weight is \(1, 6\) torch.float64 in the checkpoint"):
        restore_module(training.critic, {**tensors, weight: torch.ones(1, 6).double()}, part="critic.weights")
    moment = "critic.optimizer/weight/exp_avg"
    with pytest.raises(
        IncompleteCheckpoint, match=r"exp_avg has the shape \(2, 6\), its parameter needs \(1, 6\)"
    ):
        restore_optimizer(
            training.critic_optimizer,
            training.critic.named_parameters(),
            {**tensors, moment: torch.ones(2, 6)},
            part="critic.optimizer",
        )


def test_every_parameter_of_an_optimiser_needs_a_name_of_its_own() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match="trains 2 parameters that named_parameters does not name; name all"):
        optimizer_tensors(optimizer, one.named_parameters(), part="optimizer")
    both = [*one.named_parameters(), *other.named_parameters()]
    with pytest.raises(ValueError, match="two of the optimiser's parameters have the same name"):
        optimizer_tensors(optimizer, both, part="optimizer")


def test_a_flipped_bit_is_found_before_loading_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    training = Training().run(1)
    training.save(tmp_path)
    training.run(2).save(tmp_path)
    newest = latest(tmp_path)
    assert newest is not None
    path = newest.folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert load_latest(tmp_path).step == 1


def test_what_is_loaded_shares_no_memory_with_what_is_restored(tmp_path: Path) -> None:
    training = Training().run(1)
    training.save(tmp_path)
    tensors = load_latest(tmp_path).tensors
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    restore_module(training.policy, tensors, part="policy.weights")
    restore_optimizer(
        training.policy_optimizer, training.policy.named_parameters(), tensors, part="policy.optimizer"
    )
    training.run(3)
    assert_same(tensors, kept)


def test_there_is_no_pickle_in_a_checkpoint(tmp_path: Path) -> None:
    Training().run(1).save(tmp_path)
    files = {path.name for path in (tmp_path / "checkpoint-00000001").iterdir()}
    assert files == {"tensors.safetensors", "state.json", "manifest.json"}
    json.loads((tmp_path / "checkpoint-00000001" / "state.json").read_bytes())
