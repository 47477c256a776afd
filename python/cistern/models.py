"""Models of the C++ program as PyTorch modules to inspect and change.

They have the same config.json and model.safetensors, and give the same numbers."""

from __future__ import annotations

import json
import math
import os
import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError, answer, complete_config, model_stack
from cistern.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, bands_of
from cistern.blocks import Blocks, Stream
from cistern.masks import TokenMap, check_lengths, require_maskable
from cistern.nn import piece_positions, positions_after
from cistern.parts import Head, MatchHead, Positions, norm_of


class _TiedHead(nn.Module):
    """What an output layer that shares the embeddings' matrix has of its own: a bias."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab))


def _output(config: dict[str, Any], dim: int, vocab: int) -> nn.Module | None:
    if not config["tie_embeddings"]:
        return nn.Linear(dim, vocab, bias=config["bias"] or config["head_bias"])
    return _TiedHead(vocab) if config["head_bias"] else None


def _logits(config: dict[str, Any], x: Tensor, table: Tensor, head: nn.Module | None) -> Tensor:
    bias = head.bias if isinstance(head, _TiedHead) else None
    if head is not None and bias is None:
        return head(x)
    return F.linear(x / math.sqrt(x.shape[-1]) if config.get("scale_logits") else x, table, bias)


# Its first weights, as the program draws them: by init_std, embedding_std, position_std and init of
# the config, from torch's generator. Shapes alone (the meta device, fake tensors) get none.
def _draw(model: nn.Module, config: dict[str, Any]) -> None:
    if next(model.parameters()).untyped_storage().device.type != "meta":
        said, weights = torch.ops.cistern.initial_model_weights(json.dumps(config))
        answer(said)
        model.load_state_dict(weights)


class _Trunk(nn.Module):
    """Positions, the norm of embeddings, dropout, blocks and the final norm: what all models are
    made of."""

    def _build(self, config: dict[str, Any], form: str, extra: int = 0) -> None:
        stack = model_stack(config, form)
        dim = self._dim = stack["dim"]
        width = stack["input_dim"]  # of the tokens
        self._dropout = stack["dropout"]
        self._scale = math.sqrt(width) if config.get("scale_embeddings") else 1.0
        self._padding: str = config.get("padding", "masked")
        self._extra, self._after = extra, config.get("cls_place") == "after"
        self.embed_positions = Positions(stack["positions"], width,
                                          stack["max_length"] + (0 if self._after else extra))
        self.embed_norm = norm_of(config, width) if config["embedding_norm"] else None
        self.layers = Blocks(config, stack)
        self.norm = norm_of(config, dim) if config["final_norm"] else None

    def _enter(self, x: Tensor, positions: Tensor) -> Tensor:
        first, x = x[:, :self._extra], x[:, self._extra:] * self._scale
        if self._after:
            places = positions[:, self._extra:] - self._extra
            x = torch.cat([first, self.embed_positions(x, places)], 1)
        else:
            x = self.embed_positions(torch.cat([first, x], 1), positions)
        return F.dropout(x if self.embed_norm is None else self.embed_norm(x), self._dropout,
                         self.training)

    # The real tokens of each row first. UsageError where padding takes part.
    def _front(self, valid: Tensor, lengths: Tensor | None, starts: Tensor | None = None,
               goes_on: bool = False) -> TokenMap:
        if self._padding != "masked":
            raise UsageError(f"padding={self._padding} lets padding take part, so that no token "
                             "can be masked; leave out valid")
        for block in self.layers.each():
            if block.attention is not None:
                core = block.attention.core
                require_maskable(core.mechanism, core.sees_padding)
        return TokenMap(valid, lengths, starts, goes_on)

    def _norm(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    # A piece after `state`, with what each block has written of a source: hidden states, and the
    # state after.
    def _causal(self, x: Tensor, state: Any, keep: bool, lengths: Tensor | None,
                starts: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Any]:
        if not isinstance(state, dict) or not {"layers", "positions"} <= set(state):
            raise UsageError("expected a state, a dict of layers and positions: give what an "
                             "earlier call of extend, encode or empty_state returned")
        if valid is not None:
            front = self._front(valid, lengths, starts, goes_on=keep)
            y, after = self._causal(front.move(x, 1), state, keep, front.lengths, front.starts,
                                    None)
            return front.back(y, 1), after
        positions = piece_positions(state["positions"], x.shape[1], starts)
        places = positions
        if lengths is not None:  # padding needs none of a table's
            t = torch.arange(x.shape[1], device=x.device)
            places = positions.masked_fill(t >= lengths.unsqueeze(1), 0)
        layers, stream = [], Stream(self._enter(x, places), positions, lengths, starts)
        written = state.get("source") or [None] * len(self.layers.owners)
        left_out = self.layers.left_out()
        for i, block in enumerate(self.layers.each()):
            after = state["layers"][i]
            if not left_out[i]:
                stream, after = block(stream, after, keep, written[i])
            layers.append(after)
        after = {
            "layers": layers, "positions": positions_after(state["positions"], positions, lengths)
        }
        return self._norm(stream.x), after | {key: state[key] for key in state if key == "source"}

    def _empty(self, batch: int, device: torch.device) -> Any:
        attention = [block.attention for block in self.layers.each()]
        positions = torch.zeros(batch, dtype=torch.int64, device=device)
        return {
            "layers": [{} if a is None else a.empty_state(batch) for a in attention], "positions":
            positions
        }


def _whole(ids: Tensor, lengths: Tensor | None) -> Tensor:
    rows, length = ids.shape[:2]
    if lengths is None:
        return torch.full((rows, ), length, dtype=torch.int64, device=ids.device)
    check_lengths(lengths, rows, length)  # where padding is seen, no core does
    return lengths


# Values [B, T, C] with zeros where there are no tokens, whatever stands there: NaN would become one
# of the gradients of the map that reads them.
def _without_padding(values: Tensor, lengths: Tensor | None, valid: Tensor | None = None) -> Tensor:
    if lengths is not None:
        t = torch.arange(values.shape[1], device=values.device)
        values = values.masked_fill((t >= lengths.unsqueeze(1)).unsqueeze(-1), 0)
    return values if valid is None else values.masked_fill(~valid.bool().unsqueeze(-1), 0)


class DecoderLM(_Trunk):
    """A causal language model. model(ids) -> logits; model.extend(ids, state) continues a state.

    config: as in config.json (`load` reads one), defaults may be left out. The first weights are
    drawn as the program draws them.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config = complete_config(config, "decoder_lm")
        vocab, dim = config["vocab_size"], model_stack(config, "causal")["dim"]
        own = config.get("decoder_lm", {})
        self.adaptive: bool = own.get("embedding", "table") == "adaptive"
        self.embed_tokens: Any = AdaptiveEmbedding(
            bands_of(config, own, dim), dim) if self.adaptive else nn.Embedding(vocab, dim)
        self._build(config, "causal")
        self.lm_head: Any = AdaptiveSoftmax(config, own, dim) if self.adaptive else (
            _output(config, self._dim, vocab))
        _draw(self, config)

    def _run(self, ids: Tensor, state: Any, keep: bool, lengths: Tensor | None,
             starts: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Any]:
        x, after = self._causal(self.embed_tokens(ids), state, keep, lengths, starts, valid)
        if self.adaptive:
            return self.lm_head(x, self.embed_tokens), after
        return _logits(self.config, x, self.embed_tokens.weight, self.lm_head), after

    def forward(self, ids: Tensor, *, lengths: Tensor | None = None, starts: Tensor | None = None,
                valid: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V] (with embedding=adaptive log-probabilities). lengths,
        starts, valid: as in `Attention`."""
        before = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        return self._run(ids, {"layers": [None] * len(self.layers.owners), "positions": before},
                         False, lengths, starts, valid)[0]

    def extend(self, ids: Tensor, state: Any = None, *, lengths: Tensor | None = None,
               starts: Tensor | None = None, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """The same from a state on, and the state after; the given one is unchanged."""
        return self._run(ids,
                         self.empty_state(ids.shape[0]) if state is None else state, True, lengths,
                         starts, valid)

    def empty_state(self, batch: int) -> Any:
        """The state before the first token: {"layers": [state of each layer], "positions": [B]}."""
        return self._empty(batch, next(self.embed_tokens.parameters()).device)


class EncoderClassifier(_Trunk):
    """A bidirectional encoder with a pooled classification head: model(ids, lengths) -> logits [B,
    classes]."""

    kind = "encoder_classifier"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config = complete_config(config, self.kind)
        stack = model_stack(config, "bidirectional")
        width, self.cls = stack["input_dim"], config["pooling"] == "cls"
        values = config.get("encoder_classifier", {})
        self.values: bool = values.get("input", "tokens") == "values"
        if self.values:
            self.embed_values = nn.Linear(values["channels"], width)
        else:
            self.embed_tokens = nn.Embedding(
                config["vocab_size"], width,
                padding_idx=0 if config.get("init", {}).get("zero_pad_row") else None)
        if self.cls:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self._build(config, "bidirectional", int(self.cls))
        if config.get("padding") == "reads":
            raise UsageError("the Python package has no padding=reads; run such a model with the "
                             "program")
        self.classifier = self._head(config, stack)
        _draw(self, config)

    def _head(self, config: dict[str, Any], stack: dict[str, Any]) -> nn.Module:
        return Head(config, stack["dim"], stack["ffn_dim"], stack["dropout"])

    def forward(self, ids: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None,
                valid: Tensor | None = None) -> Tensor:
        """ids [B, T] int64, or values [B, T, C] where the config says so; lengths [B] int64:
        padding on the right is never seen; positions [B, T] int64: 0, 1, 2, ... where left out;
        valid [B, T] bool: false where a token is as if it were not there."""
        return self.classifier(self.encode(ids, lengths, positions, valid))

    def encode(self, ids: Tensor, lengths: Tensor | None = None, positions: Tensor | None = None,
               valid: Tensor | None = None) -> Tensor:
        """The same up to the pooled vector of each row, [B, dim]."""
        if valid is not None:
            front = self._front(valid, lengths)
            positions = None if positions is None else front.move(positions, 1)
            return self.encode(front.move(ids, 1), front.lengths, positions)
        lengths = _whole(ids, lengths)
        padding, pooling = self.config.get("padding", "masked"), self.config["pooling"]
        if self.values and padding != "seen":
            ids = _without_padding(ids, lengths)
        x = self.embed_values(ids) if self.values else self.embed_tokens(ids)
        if padding == "zeros":
            t = torch.arange(ids.shape[1], device=ids.device)
            x = x.masked_fill((t >= lengths.unsqueeze(1)).unsqueeze(-1), 0)
        if self.cls:
            x = torch.cat([self.cls_token.expand(ids.shape[0], 1, -1), x], 1)
        places = torch.arange(x.shape[1], device=ids.device).unsqueeze(0)
        if positions is not None:
            if model_stack(self.config, "bidirectional")["positions"] == "relative":
                raise UsageError("positions=relative counts the tokens that are there, and these "
                                 "have positions of their own")
            places = F.pad(positions + 1, (1, 0)) if self.cls else positions
        seen = padding in ("seen", "zeros")
        stream = Stream(self._enter(x, places), places, None if seen else lengths + int(self.cls))
        positions = torch.arange(x.shape[1], device=ids.device).unsqueeze(0)
        for block in self.layers.kept():
            stream, _ = block(stream)
        slots = pooling == "memory"
        x = stream.memory if slots else stream.x
        if not self.config["norm_pooled"]:
            x = self._norm(x)
        if pooling in ("cls", "first"):
            pooled = x[:, 0]
        elif (slots or stream.source is not None  # slots or latents: no padding among them
              or pooling == "mean_all" or (pooling == "mean" and seen)):
            pooled = x.mean(1)
        else:
            real = positions < lengths.unsqueeze(1)
            pooled = x.masked_fill(~real.unsqueeze(-1), 0).sum(1)
            pooled = pooled / (x.shape[1] if pooling == "mean_zeros" else
                               lengths.clamp_min(1).unsqueeze(1).to(x.dtype))
        return self._norm(pooled) if self.config["norm_pooled"] else pooled


class TwoTower(EncoderClassifier):
    """One encoder for two texts and a head that compares them: model(ids, second_ids) -> logits
    [B, classes]."""

    kind = "two_tower"

    def _head(self, config: dict[str, Any], stack: dict[str, Any]) -> nn.Module:
        match = config.get("two_tower", {}).get("match", "lra")
        given: float = config.get("head_dropout", -1)
        return MatchHead(match, stack["dim"], stack["ffn_dim"], config["classes"],
                         given if given >= 0 else stack["dropout"])

    def forward(self, ids: Tensor, second_ids: Tensor, lengths: Tensor | None = None,
                second_lengths: Tensor | None = None, valid: Tensor | None = None,
                second_valid: Tensor | None = None) -> Tensor:
        """ids [B, T], second_ids [B, S] int64; padding on the right is never seen, nor are tokens
        where valid [B, T] or second_valid [B, S] is false."""
        return self.classifier(
            self.encode(ids, lengths, valid=valid),
            self.encode(second_ids, second_lengths, valid=second_valid))


class MaskedLM(_Trunk):
    """A bidirectional encoder that predicts hidden tokens: model(ids, lengths) -> logits [B, T, V].
    `mask_id` among the ids hides a token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config = complete_config(config, "masked_lm")
        vocab = self.mask_id = config["vocab_size"]
        dim = model_stack(config, "bidirectional")["dim"]
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self._build(config, "bidirectional")
        self.lm_head = _output(config, dim, vocab)
        transform = config.get("masked_lm", {}).get("transform", True)
        self.transform = nn.Linear(dim, dim) if transform else None
        self.transform_norm = norm_of(config, dim) if transform else None
        _draw(self, config)

    def forward(self, ids: Tensor, lengths: Tensor | None = None,
                valid: Tensor | None = None) -> Tensor:
        """ids [B, T] int64, lengths [B] int64: padding on the right is never seen, nor are tokens
        where valid [B, T] is false."""
        if valid is not None:
            front = self._front(valid, lengths)
            return front.back(self(front.move(ids, 1), front.lengths), 1)
        masked = ids == self.mask_id
        x = torch.where(masked.unsqueeze(-1), self.mask_token,
                        self.embed_tokens(ids.masked_fill(masked, 0)))
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        stream = Stream(self._enter(x, positions), positions, lengths)
        for block in self.layers.kept():
            stream, _ = block(stream)
        x = self._norm(stream.x)
        if self.transform is not None and self.transform_norm is not None:
            x = self.transform_norm(F.gelu(self.transform(x)))
        return _logits(self.config, x, self.embed_tokens.weight, self.lm_head)


class SpanPredictor(_Trunk):
    """A bidirectional encoder that finds a span: model(ids, lengths) -> logits [B, T, 2] of being
    the span's first token, and its last."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config = complete_config(config, "span_predictor")
        dim = model_stack(config, "bidirectional")["dim"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], dim)
        self._build(config, "bidirectional")
        self.span_head = nn.Linear(dim, 2, bias=False)
        _draw(self, config)

    def forward(self, ids: Tensor, lengths: Tensor | None = None,
                valid: Tensor | None = None) -> Tensor:
        """ids [B, T] int64, lengths [B] int64: padding on the right is never seen, nor are tokens
        where valid [B, T] is false; their logits mean nothing."""
        if valid is not None:
            front = self._front(valid, lengths)
            return front.back(self(front.move(ids, 1), front.lengths), 1)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        stream = Stream(self._enter(self.embed_tokens(ids), positions), positions, lengths)
        for block in self.layers.kept():
            stream, _ = block(stream)
        return self.span_head(self._norm(stream.x))


class _Half(_Trunk):
    """The encoder or the decoder of a model that has both."""

    def __init__(self, config: dict[str, Any], form: str) -> None:
        super().__init__()
        self._build(config, form)


class EncoderDecoder(nn.Module):
    """Sequence to sequence: model(source, ids) -> logits of the target; encode(source) once and
    extend(ids, state) often."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config = complete_config(config, "encoder_decoder")
        if config.get("cross", {}).get("memory", "own") != "own":
            raise UsageError("the Python package has no cross.memory; run such a model with the "
                             "C++ library")
        vocab = config["target_vocab_size"] or config["vocab_size"]
        dims = [model_stack(config, form)["input_dim"] for form in ("bidirectional", "causal")]
        self.embed_tokens = nn.Embedding(vocab, dims[1])
        share = config.get("encoder_decoder", {}).get("share_embeddings", True)
        self.source_embed_tokens = None if share else nn.Embedding(config["vocab_size"], dims[0])
        self.encoder = _Half(config, "bidirectional")
        self.decoder = _Half(config, "causal")
        self.lm_head = _output(config, dims[1], vocab)
        _draw(self, config)

    def _encoded(self, source: Tensor, lengths: Tensor | None, valid: Tensor | None,
                 keep: bool) -> list[Any]:
        if valid is not None:
            front = self.encoder._front(valid, lengths)
            return self._encoded(front.move(source, 1), front.lengths, None, keep)
        table = self.embed_tokens if self.source_embed_tokens is None else self.source_embed_tokens
        positions = torch.arange(source.shape[1], device=source.device).unsqueeze(0)
        stream = Stream(self.encoder._enter(table(source), positions), positions, lengths)
        for block in self.encoder.layers.kept():
            stream, _ = block(stream)
        if stream.source is not None:  # latents: no padding among them
            lengths = None
        x = self.encoder._norm(stream.x)
        return [block.write(x, lengths, keep) for block in self.decoder.layers.each()]

    def _run(self, ids: Tensor, state: Any, keep: bool, lengths: Tensor | None,
             valid: Tensor | None) -> tuple[Tensor, Any]:
        x, after = self.decoder._causal(self.embed_tokens(ids), state, keep, lengths, None, valid)
        return _logits(self.config, x, self.embed_tokens.weight, self.lm_head), after

    def forward(self, source: Tensor, ids: Tensor, *, source_lengths: Tensor | None = None,
                lengths: Tensor | None = None, source_valid: Tensor | None = None,
                valid: Tensor | None = None) -> Tensor:
        """source [B, S], ids [B, T] int64, the target's tokens -> logits [B, T, V]. Padding on the
        right is never seen, nor are tokens where source_valid [B, S] or valid [B, T] is false."""
        before = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        layers = [None] * len(self.decoder.layers.owners)
        written = self._encoded(source, source_lengths, source_valid, False)
        state = {"layers": layers, "positions": before, "source": written}
        return self._run(ids, state, False, lengths, valid)[0]

    def encode(self, source: Tensor, lengths: Tensor | None = None,
               valid: Tensor | None = None) -> Any:
        """The state before the first token of the target."""
        state = self.decoder._empty(source.shape[0], source.device)
        return state | {"source": self._encoded(source, lengths, valid, True)}

    def extend(self, ids: Tensor, state: Any, *, lengths: Tensor | None = None,
               valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Logits of the next tokens, and the state after; the given one is unchanged."""
        return self._run(ids, state, True, lengths, valid)


class Forecaster(_Trunk):
    """A causal model of real values: model(values) -> the step that follows each one.

    config: as in config.json (`load` reads one).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config = complete_config(config, "forecaster")
        own, dim = config["forecaster"], model_stack(config, "causal")["dim"]
        self.outputs: int = own["outputs"]
        self.residual: bool = own.get("residual", True)
        self.embed_values = nn.Linear(own["inputs"], dim)
        self._build(config, "causal")
        self.out_proj = nn.Linear(dim, self.outputs)
        _draw(self, config)

    def _run(self, values: Tensor, state: Any, keep: bool, lengths: Tensor | None,
             starts: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Any]:
        values = _without_padding(values, lengths, valid)
        x, after = self._causal(self.embed_values(values), state, keep, lengths, starts, valid)
        y = self.out_proj(x)
        return y + values[..., :self.outputs] if self.residual else y, after

    def forward(self, values: Tensor, *, lengths: Tensor | None = None,
                starts: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """values [B, T, inputs], scaled as in training -> [B, T, outputs]. lengths, starts, valid:
        as in `Attention`."""
        before = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
        return self._run(values, {"layers": [None] * len(self.layers.owners), "positions": before},
                         False, lengths, starts, valid)[0]

    def extend(self, values: Tensor, state: Any = None, *, lengths: Tensor | None = None,
               starts: Tensor | None = None, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """The same from a state on, and the state after; the given one is unchanged."""
        return self._run(values,
                         self.empty_state(values.shape[0]) if state is None else state, True,
                         lengths, starts, valid)

    def empty_state(self, batch: int) -> Any:
        """The state before the first step: {"layers": [state of each layer], "positions": [B]}."""
        return self._empty(batch, next(self.parameters()).device)


# The module of each kind of model that the C++ library has.
KINDS: dict[str, type[nn.Module]] = {
    "decoder_lm": DecoderLM,
    "encoder_classifier": EncoderClassifier,
    "encoder_decoder": EncoderDecoder,
    "forecaster": Forecaster,
    "masked_lm": MaskedLM,
    "span_predictor": SpanPredictor,
    "two_tower": TwoTower,
}


def load(
        folder: str | os.PathLike[str]
) -> (DecoderLM | EncoderClassifier | EncoderDecoder | Forecaster | MaskedLM | SpanPredictor |
      TwoTower):
    """A model that the C++ program trained: a folder with config.json and model.safetensors, in
    evaluation mode.

    To save one back, with the package safetensors: save_file(model.state_dict(), folder +
    "/model.safetensors").

    Warns where config.json, or a file beside it, is not the one that the weights were saved with.

    Raises:
        UsageError: a config that is not valid; weights that are not those of the config.
        RuntimeError: a file that cannot be read. All of them name the file.
    """
    folder = os.fspath(folder)
    config = answer(torch.ops.cistern.folder_config(folder))
    if config["kind"] not in KINDS:
        raise UsageError(
            f"{folder}/config.json: the Python package lacks models of kind {config['kind']}; run "
            "this one with the program")
    file = os.path.join(folder, "model.safetensors")
    weights = torch.ops.cistern.load_tensors(file)
    for said in torch.ops.cistern.changed_files(folder):
        warnings.warn(said, stacklevel=2)
    for name, w in weights.items():
        if not w.is_floating_point():
            raise UsageError(
                f"{file}: tensor '{name}' has type {w.dtype}, expected floating point")
    device = torch.get_default_device()
    # Shapes alone; what cores draw even so leaves torch's generator as it was.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = KINDS[config["kind"]](config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        raise UsageError(f"{file}: {e}") from None
    model.to(device=device, dtype=next((w.dtype for w in weights.values()), torch.float32))
    model.eval()
    return cast(Any, model)
