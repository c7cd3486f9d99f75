"""A causal language model's trunk with one scalar per position: reward models and value models.

`AutoModelForSequenceClassification(num_labels=1)` reads a reward folder, if transformers has that class for the
architecture; `scalar.json` in it holds the shift that is subtracted from the raw score. A value folder, and a reward
folder of an architecture without that class, has the trunk as `AutoModel` reads it, with the head in `head.safetensors`
(`weight` (1, H) and, in value models, `bias` (1,)) and the same `scalar.json`. A critic that predicts quantiles or is
an ensemble has N rows in its head, and its form in `scalar.json`; its value is the mean of the N outputs.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from vantage.models.adapters import has_adapters, write_adapters
from vantage.models.folders import (
    UnsafeModel,
    check_embeddings,
    check_folder,
    load_config,
    load_weights,
    read_tensor,
    save_tokenizer,
    save_weights,
)
from vantage.models.logprobs import token_logprobs
from vantage.models.output_head import LanguageHead, output_head, trunk
from vantage.models.scalar_head import critic_head_from, fresh_head, read_outputs, read_scalars
from vantage.models.scalar_sidecar import SIDECAR, Role, read_sidecar, refuse_other_head, write_sidecar
from vantage.models.sequences import Sequences
from vantage.models.sharding import are_deferred, is_sharded, whole_weights
from vantage.models.shared_weights import shared
from vantage.models.stored_models import Training, load_stored_policy, whole_folder, with_adapters
from vantage.models.token_states import token_states
from vantage.schemas.recipe.critic_head import ONE_VALUE, CriticHead
from vantage.schemas.records.model_files import ModelFiles

HEAD = "head.safetensors"


class ScalarModel(nn.Module):
    """head(backbone(tokens)) − score_shift at every position.

    Weights are read only in `forward`: sharding (FSDP2) gathers them only for a module's own forward pass.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        head: nn.Linear,
        *,
        score_shift: float = 0.0,
        language_head: LanguageHead | None = None,
        form: CriticHead = ONE_VALUE,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.form = form
        self.score_shift = score_shift
        self.language_head = language_head

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.backbone.device

    def forward(
        self, sequences: Sequences, positions: Tensor, language_rows: int = 0, *, every_output: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return scalars (B, P) in float32 at `positions` (B, P) of the sequences.

        With `language_rows`, also the language head's log-probabilities (N, T) of the first N responses, from the same
        pass. With `every_output`, all outputs (B, P, N) of the head instead of their mean.
        """
        states = token_states(self.backbone, sequences)
        rows = torch.arange(len(sequences), device=positions.device)[:, None].expand_as(positions)
        read = read_outputs if every_output else read_scalars
        scalars = read(states[sequences.places(rows, positions)], self.head) - self.score_shift
        return (scalars, self._logprobs(states, sequences, language_rows)) if language_rows else scalars

    def _logprobs(self, states: Tensor, sequences: Sequences, num_rows: int) -> Tensor:
        assert self.language_head is not None, "loaded with one"
        mask = sequences.response_mask[:num_rows]
        rows, steps = sequences.response_tokens(num_rows)
        logprobs = token_logprobs(
            states[sequences.places(rows, sequences.response_positions[rows, steps])],
            sequences.response_ids[rows, steps],
            self.language_head.on(self.backbone),
            temperature=1.0,
        ).logprobs
        return logprobs.new_zeros(mask.shape).index_put((rows, steps), logprobs)


def freeze_attention(model: ScalarModel) -> None:
    """Freeze the weights of all attention modules of the trunk; the other weights still learn.

    Raises:
        ValueError: no module of the trunk is known to be attention.
    """
    attention = [module for module in model.backbone.modules() if "Attention" in type(module).__name__]
    if not attention:
        raise ValueError(
            f"freeze_critic=attention finds no attention module in {type(model.backbone).__name__}; leave it out"
        )
    for module in attention:
        module.requires_grad_(False)


def scores(model: ScalarModel, sequences: Sequences) -> Tensor:
    """Return the score (B,) of each response, read at its last valid token, in float32.

    Raises:
        ValueError: a response has no token.
    """
    read: Tensor = model(sequences, _last_positions(sequences))
    return read[:, 0]


def scores_and_logprobs(
    model: ScalarModel, sequences: Sequences, *, first_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the score (B,) of each response, and log-probabilities (N, T) of the first N responses, in one pass.

    Raises:
        ValueError: a response has no token.
    """
    scalars, logprobs = model(sequences, _last_positions(sequences), first_rows)
    return scalars[:, 0], logprobs


def _last_positions(sequences: Sequences) -> Tensor:
    """Return the position (B, 1) of the last valid token of each response."""
    _refuse_empty(sequences.known.responses)
    return sequences.last_positions[:, None]


def values(model: ScalarModel, sequences: Sequences) -> Tensor:
    """Return values (B, T) in float32; V_t has seen the prompt and the response tokens before t. Masked places are 0.

    Raises:
        ValueError: a response has no token.
    """
    _refuse_empty(sequences.known.responses)
    result = model(sequences, sequences.response_positions)
    return torch.where(sequences.response_mask, result, result.new_zeros(()))


def outputs(model: ScalarModel, sequences: Sequences) -> Tensor:
    """Return all outputs (B, T, N) of a critic's head in float32; `values` are their mean. Masked places are 0.

    Raises:
        ValueError: a response has no token.
    """
    _refuse_empty(sequences.known.responses)
    result: Tensor = model(sequences, sequences.response_positions, every_output=True)
    return torch.where(sequences.response_mask[..., None], result, result.new_zeros(()))


def values_and_final(model: ScalarModel, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return `values`, and the value (B,) of each whole response, which has seen its last token too, in one pass.

    Raises:
        ValueError: a response has no token.
    """
    positions = torch.cat([sequences.response_positions, _last_positions(sequences)], dim=1)
    result = model(sequences, positions)
    per_token = torch.where(sequences.response_mask, result[:, :-1], result.new_zeros(()))
    return per_token, result[:, -1]


def reward_with_language_head(
    files: ModelFiles | Path, *, seed: int, device: torch.device, training: Training = "all"
) -> ScalarModel:
    """Return a policy's trunk and a fresh head, on a device, with the policy's output head for a language-modelling
    loss.

    An output head that is tied to the embeddings belongs to the trunk and trains with it; any other stays as it is.

    Raises:
        UnsafeModel: see `vantage.models.stored_models.load_stored_policy`.
    """
    files = _as_files(files)
    policy = load_stored_policy(files, training=training)
    if not are_deferred():
        policy.to(device)  # type: ignore[arg-type]
    backbone, head = trunk(policy), output_head(policy)
    is_tied = head.weight is policy.get_input_embeddings().weight
    if are_deferred() and not is_tied:  # the output head is frozen, and is not sharded
        [name] = [name for name, weight in policy.named_parameters() if weight is head.weight]
        weight = read_tensor(whole_folder(files), name)
        if weight is None:
            raise UnsafeModel(f"{whole_folder(files)} has no {name}; use distributed.strategy: ddp")
        head = replace(head, weight=weight.to(device))
    language_head = LanguageHead(head, is_tied=is_tied)
    scalar_head = fresh_head(backbone, seed=seed, bias=False)
    return ScalarModel(backbone, scalar_head, language_head=language_head).eval()


def fresh_value_head(policy: PreTrainedModel, *, seed: int) -> nn.Linear:
    """Return the initial head of a critic from this policy with its own trunk, in float32 on the policy's device."""
    head = fresh_head(trunk(policy), seed=seed, bias=True)
    return head if policy.device.type == "meta" else head.to(policy.device)


def value_from_policy(
    files: ModelFiles | Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    training: Training = "all",
    form: CriticHead = ONE_VALUE,
) -> ScalarModel:
    """Return a policy's trunk with a new small head and a bias of 0.

    Raises:
        UnsafeModel: see `vantage.models.stored_models.load_stored_policy`.
    """
    backbone = trunk(load_stored_policy(_as_files(files), training=training, dtype=dtype))
    head = critic_head_from(fresh_head(backbone, seed=seed, bias=True), form, seed=seed)
    return _frozen_where(training, ScalarModel(backbone, head, form=form).eval())


def value_from_reward(
    files: ModelFiles | Path,
    *,
    dtype: torch.dtype = torch.float32,
    training: Training = "all",
    form: CriticHead = ONE_VALUE,
    seed: int = 0,
) -> ScalarModel:
    """Return a reward model's trunk and head; its score shift becomes the bias, so at first V equals the score.

    Raises:
        UnsafeModel: see `vantage.models.stored_models.load_stored_policy`.
        ValueError: the folder is no reward model.
    """
    reward = load_scalar(files, role="reward", dtype=dtype, training=training)
    head = nn.Linear(reward.head.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(reward.head.weight)
        head.bias.fill_(-reward.score_shift)
    head = critic_head_from(head, form, seed=seed)
    return _frozen_where(training, ScalarModel(reward.backbone, head, form=form).eval())


def load_critic(
    files: ModelFiles | Path, *, seed: int, training: Training = "all", form: CriticHead = ONE_VALUE
) -> ScalarModel:
    """Return a critic from the folder's model: a value model as it is, a reward model, or a policy with a fresh head.

    Raises:
        UnsafeModel: see `vantage.models.stored_models.load_stored_policy`.
        HeadDiffers: the folder's value model has another form of head.
    """
    folder = _as_files(files).folder
    if not (folder / SIDECAR).is_file():
        return value_from_policy(files, seed=seed, training=training, form=form)
    if read_sidecar(folder).role == "reward":
        return value_from_reward(files, training=training, form=form, seed=seed)
    refuse_other_head(folder, form)
    return load_scalar(files, role="value", training=training)


def _frozen_where(training: Training, model: ScalarModel) -> ScalarModel:
    """Freeze the head too if nothing is trained."""
    if training == "nothing":
        model.head.requires_grad_(False)
    return model


def load_scalar(
    files: ModelFiles | Path,
    *,
    role: Role | None = None,
    dtype: torch.dtype = torch.float32,
    training: Training = "all",
) -> ScalarModel:
    """Load a model that `save_reward` or `save_value` wrote, in evaluation mode; the head is always float32.

    Raises:
        UnsafeModel: see `vantage.models.stored_models.load_stored_policy`, or there is no head.
        ValueError: the folder holds the other role than `role`.
    """
    files = _as_files(files)
    sidecar = read_sidecar(files.folder)
    if role is not None and sidecar.role != role:
        raise ValueError(f"{files.folder} holds a {sidecar.role} model, where a {role} model is needed")
    whole = whole_folder(files)
    if not (whole / SIDECAR).is_file():  # the folder holds adapters on a policy's trunk
        backbone = trunk(load_stored_policy(files, training=training, dtype=dtype))
    elif training == "all":
        backbone = with_adapters(_load_backbone(whole, dtype=dtype), files, training)
    else:
        backbone = shared(whole, dtype, lambda: _load_backbone(whole, dtype=dtype))
        backbone = with_adapters(backbone, files, training)
    head = _load_head(files.folder, backbone, outputs=sidecar.head.outputs)
    model = ScalarModel(backbone, head, score_shift=sidecar.score_shift, form=sidecar.head)
    return _frozen_where(training, model.eval())


def _load_backbone(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the trunk of a whole reward or value model."""
    check_folder(folder)
    config = load_config(folder)
    if (folder / HEAD).is_file():
        return load_weights(AutoModel, folder, config, dtype=dtype)
    return trunk(load_weights(AutoModelForSequenceClassification, folder, config, dtype=dtype))


def _load_head(folder: Path, backbone: PreTrainedModel, *, outputs: int) -> nn.Linear:
    if (folder / HEAD).is_file():
        tensors = load_file(folder / HEAD)
        weight, bias = tensors.get("weight"), tensors.get("bias")
    else:
        weight, bias = read_tensor(folder, "score.weight"), None
    hidden_size = backbone.config.get_text_config().hidden_size
    if weight is None or weight.shape != (outputs, hidden_size):
        raise UnsafeModel(
            f"{folder} has no head of shape ({outputs}, {hidden_size}); save it with save_reward or save_value"
        )
    head = nn.Linear(hidden_size, outputs, bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head


def _as_files(files: ModelFiles | Path) -> ModelFiles:
    return ModelFiles(files) if isinstance(files, Path) else files


def save_reward(
    model: ScalarModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    score_shift: float,
    base: str | None = None,
) -> None:
    """Write a reward model whose score is the raw one minus `score_shift`; the same model gives the same bytes.

    Args:
        base: content digest of the whole base model, if the trunk has adapters; then only the adapters are written.

    Raises:
        ValueError: the head has a bias (that is a value model), the shift is not finite, or the tokenizer does
            not fit the trunk.
    """
    if not math.isfinite(score_shift):
        raise ValueError(
            f"score_shift={score_shift} is not finite; look at the scores that it is the mean of"
        )
    if model.head.bias is not None:
        raise ValueError("a reward model's head has no bias; save a value model with save_value")
    classifier = None if has_adapters(model) else _as_sequence_classifier(model)
    if has_adapters(model):
        _save_adapters(model, tokenizer, folder, base)
    elif classifier is None:
        _save_trunk(model.backbone, tokenizer, folder)
        _save_head(model, folder)
    else:
        _save_trunk(classifier, tokenizer, folder)
    write_sidecar(folder, role="reward", score_shift=score_shift)


def save_value(
    model: ScalarModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, base: str | None = None
) -> None:
    """Write a value model; the same model gives the same bytes. ``base``: see `save_reward`.

    Raises:
        ValueError: the head has no bias (that is a reward model), or the tokenizer does not fit the trunk.
    """
    if model.head.bias is None:
        raise ValueError("a value model's head has a bias; save a reward model with save_reward")
    if has_adapters(model):
        _save_adapters(model, tokenizer, folder, base)
    else:
        _save_trunk(model.backbone, tokenizer, folder)
        _save_head(model, folder)
    write_sidecar(folder, role="value", score_shift=0.0, head=model.form)


def _save_adapters(
    model: ScalarModel, tokenizer: PreTrainedTokenizerBase, folder: Path, base: str | None
) -> None:
    write_adapters(model.backbone, folder, base=base)
    save_tokenizer(tokenizer, folder)
    _save_head(model, folder)


def _save_head(model: ScalarModel, folder: Path) -> None:
    weights = whole_weights(model.head) if is_sharded(model) else model.head.state_dict()
    if weights:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / HEAD)


def _refuse_empty(lengths: Sequence[int]) -> None:
    if 0 in lengths:
        raise ValueError(
            f"the response of row {lengths.index(0)} has no tokens, so there is nothing to score; drop it"
        )


def _as_sequence_classifier(model: ScalarModel) -> PreTrainedModel | None:
    """Return the model in transformers' own class for it, sharing its tensors; None if there is no such class with a
    plain head."""
    config = copy.deepcopy(model.backbone.config)
    config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    head = getattr(classifier, "score", None)
    if (
        not isinstance(head, nn.Linear)
        or head.bias is not None
        or not hasattr(classifier, classifier.base_model_prefix)
    ):
        return None
    setattr(classifier, classifier.base_model_prefix, model.backbone)
    classifier.score = model.head
    return classifier


def _save_trunk(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    check_embeddings(model, tokenizer)
    save_weights(model, tokenizer, folder)
