"""Heads with several outputs begin as their form demands, a critic's folder records the form, and other forms are refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.models.test_heads import CPU, PROMPTS, RESPONSES, SHIFT
from tests.support.every import every
from vantage.models.folders import UnsafeModel
from vantage.models.heads import (
    ScalarModel,
    load_critic,
    load_scalar,
    outputs,
    reward_with_language_head,
    save_reward,
    save_value,
    scores,
    values,
    values_and_final,
)
from vantage.models.scalar_sidecar import HeadDiffers
from vantage.models.sequences import Sequences, collate
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead

QUANTILES, ENSEMBLE = CriticHead(quantiles=5), CriticHead(ensemble=3)


@pytest.fixture
def sequences() -> Sequences:
    return collate(PROMPTS, RESPONSES, pad_token_id=0)


@pytest.fixture
def reward_folder(tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    reward = reward_with_language_head(tiny, seed=5, device=CPU)
    save_reward(reward, tiny_tokenizer, tmp_path / "reward", score_shift=SHIFT)
    return tmp_path / "reward"


def critic_of(source: Path, form: CriticHead) -> ScalarModel:
    return load_critic(source, seed=7, form=form)


@every("form", [QUANTILES, ENSEMBLE])
def test_a_critic_from_a_reward_model_begins_as_its_score(
    form: CriticHead, reward_folder: Path, sequences: Sequences
) -> None:
    critic = critic_of(reward_folder, form)
    with torch.no_grad():
        found, end = values_and_final(critic, sequences)
        expected = values(critic_of(reward_folder, ONE_VALUE), sequences)
        score = scores(load_scalar(reward_folder), sequences)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(end, score, rtol=1e-5, atol=1e-6)


def test_the_seed_draws_the_ensemble_of_a_critic_from_a_reward_model(reward_folder: Path) -> None:
    heads = [load_critic(reward_folder, seed=seed, form=ENSEMBLE).head.weight for seed in (7, 7, 8)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    torch.testing.assert_close(heads[0].mean(dim=0), heads[2].mean(dim=0), rtol=1e-5, atol=1e-6)


def test_quantiles_begin_as_copies_and_an_ensemble_begins_apart(tiny: Path, sequences: Sequences) -> None:
    with torch.no_grad():
        copies = outputs(critic_of(tiny, QUANTILES), sequences)
        apart = outputs(critic_of(tiny, ENSEMBLE), sequences)
        alone = values(critic_of(tiny, ONE_VALUE), sequences)
    mask = sequences.response_mask
    assert copies.shape == (*mask.shape, 5) and apart.shape == (*mask.shape, 3)
    rows = critic_of(tiny, QUANTILES).head.weight
    assert torch.equal(rows, rows[:1].expand_as(rows))
    torch.testing.assert_close(copies, copies[..., :1].expand_as(copies), rtol=1e-6, atol=1e-6)
    assert bool((apart[mask].std(-1) > 1e-3).all())
    torch.testing.assert_close(apart.mean(-1), alone, rtol=1e-5, atol=1e-6)
    assert bool((apart[~mask] == 0).all())
    other = load_critic(tiny, seed=8, form=ENSEMBLE)
    assert not torch.equal(other.head.weight, critic_of(tiny, ENSEMBLE).head.weight)


@pytest.mark.slow
@every(("form", "entries"), [(QUANTILES, {"quantiles": 5}), (ENSEMBLE, {"ensemble": 3}), (ONE_VALUE, {})])
def test_a_critic_s_folder_records_its_form(
    form: CriticHead,
    entries: dict[str, int],
    tiny: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    sequences: Sequences,
) -> None:
    critic = critic_of(tiny, form)
    save_value(critic, tiny_tokenizer, tmp_path / "value")
    sidecar = json.loads((tmp_path / "value" / "scalar.json").read_text())
    assert sidecar == {"role": "value", "score_shift": 0.0, **entries}
    again = load_critic(tmp_path / "value", seed=0, form=form)
    assert again.form.form == form.form
    with torch.no_grad():
        assert torch.equal(outputs(again, sequences), outputs(critic, sequences))
        anyone = values(load_scalar(tmp_path / "value", role="value"), sequences)
        torch.testing.assert_close(anyone, outputs(critic, sequences).mean(-1))


@every(
    ("form", "wanted", "message"),
    [
        (QUANTILES, ONE_VALUE, r"critic_head=\{\} is not the head .* critic_head=\{quantiles: 5\}; set critic_head: "
         r"\{quantiles: 5\}, or pretrain a critic with head: \{\}"),
        (QUANTILES, CriticHead(quantiles=4), r"set critic_head: \{quantiles: 5\}"),
        (ONE_VALUE, ENSEMBLE, r"or pretrain a critic with head: \{ensemble: 3\}"),
        (CriticHead(ensemble=5), QUANTILES, r"which has critic_head=\{ensemble: 5\}"),
    ],
)  # fmt: skip
def test_a_critic_of_another_form_is_refused_with_the_remedy(
    form: CriticHead,
    wanted: CriticHead,
    message: str,
    tiny: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    save_value(critic_of(tiny, form), tiny_tokenizer, tmp_path / "value")
    with pytest.raises(HeadDiffers, match=message):
        load_critic(tmp_path / "value", seed=0, form=wanted)


def test_settings_of_the_loss_are_no_form(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_value(critic_of(tiny, QUANTILES), tiny_tokenizer, tmp_path / "value")
    assert load_critic(tmp_path / "value", seed=0, form=CriticHead(quantiles=5, huber=1.0)).form == QUANTILES


def test_a_head_that_contradicts_the_form_is_refused(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    folder = tmp_path / "value"
    save_value(critic_of(tiny, QUANTILES), tiny_tokenizer, folder)
    (folder / "scalar.json").write_text(json.dumps({"role": "value", "score_shift": 0.0, "quantiles": 6}))
    with pytest.raises(UnsafeModel, match=r"no head of shape \(6, "):
        load_scalar(folder)
    (folder / "scalar.json").write_text(
        json.dumps({"role": "value", "score_shift": 0.0, "quantiles": "many"})
    )
    with pytest.raises(UnsafeModel, match=r"scalar\.json does not give role"):
        load_scalar(folder)


@every("form", [QUANTILES, ENSEMBLE, ONE_VALUE])
def test_nothing_of_a_frozen_critic_asks_for_a_gradient(
    form: CriticHead, tiny: Path, reward_folder: Path
) -> None:
    for source in (tiny, reward_folder):
        critic = load_critic(source, seed=7, training="nothing", form=form)
        assert not any(parameter.requires_grad for parameter in critic.parameters())
