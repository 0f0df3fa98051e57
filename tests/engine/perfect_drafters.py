"""A target whose next token only its hidden states tell, and heads that draft for it without a mistake.

The first token of a text says whether it counts up or down; the others are digits. Every layer writes that direction
into one coordinate of its states with the opposite sign of the layer before. So a head that reads a neighbouring layer,
or states of another position's request, drafts in the wrong direction: all its tokens are rejected.

Coordinates of a state: the token, one-hot; the first token's sign; a constant; the direction; the next token, one-hot;
and, in a DFlash drafter, the digit before.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.reference_checkpoints import save

DIGITS, UP, DOWN = 8, 8, 9
V = DIGITS + 2
TOKEN, SIGN, ONE, DIRECTION, NEXT, BEFORE = 0, V, V + 1, V + 2, V + 3, 2 * V + 3
H, HEADS, SIZE, LAYERS = 32, 4, 8, 9
TAPS = (2, 4, 6)
EXPERTS = 2
STRENGTH = 30.0
"""The direction at the first position; it falls as 1 / length, because attention averages over the text."""
SHARP = 200.0
"""Slope of the gates, and scale of the logits: an open gate decides, a closed one adds nothing."""

SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 2 * V,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
NO_END: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def follower(token: int, direction: int) -> int:
    """Return the token after this one."""
    return 0 if token >= DIGITS else (token + direction) % DIGITS


def continued(prompt: list[int], length: int) -> list[int]:
    """Return the text that the target writes after a prompt."""
    text = list(prompt)
    for _ in range(length):
        text.append(follower(text[-1], 1 if prompt[0] == UP else -1))
    return text[len(prompt) :]


@cache
@torch.no_grad()
def target(kind: type = tf.LlamaForCausalLM) -> tf.PreTrainedModel:
    """Build the target: in every layer attention averages over the text, and only the last layer's MLP is not zero.

    Recurrent layers, those of Qwen3.5, add nothing. Its attention halves its outputs: a gate is sigmoid(0).
    """
    model = kind(config(kind)).eval()
    for name, weight in model.named_parameters():
        weight.fill_(neutral_norm(kind) if "norm" in name else 0.0)
    stack = [layer for layer in model.model.layers if hasattr(layer, "self_attn")]
    table = model.get_input_embeddings().weight
    table[:, TOKEN : TOKEN + V] = torch.eye(V)
    table[UP, SIGN], table[DOWN, SIGN] = 1.0, -1.0
    table[:, ONE] = 1.0
    before = 0.0
    for index, layer in enumerate(stack):
        # The first position attends to itself alone: its direction is the gain times its sign, over its own RMS.
        after = STRENGTH * (-1) ** index
        rms = ((3 + before**2) / H) ** 0.5
        layer.self_attn.v_proj.weight[0, SIGN] = 1.0
        layer.self_attn.o_proj.weight[DIRECTION, 0] = (after - before) * rms * (2 if is_gated(kind) else 1)
        before = after
    count(stack[-1].mlp, closing=2 * STRENGTH, sign=(-1) ** (len(stack) - 1), upward=0.05)
    model.lm_head.weight[:, NEXT : NEXT + V] = SHARP * torch.eye(V)
    return model


def is_gated(kind: type) -> bool:
    return kind is tf.Qwen3_5ForCausalLM


def neutral_norm(kind: type) -> float:
    """Return the weight of a norm that scales nothing; Qwen3.5 adds 1 to it."""
    return 0.0 if is_gated(kind) else 1.0


def config(kind: type) -> tf.PreTrainedConfig:
    if kind is tf.Qwen3_5ForCausalLM:
        types = ["linear_attention"] * 2 + ["full_attention"] * (LAYERS - 2)
        sizes = {**SIZES, "layer_types": types, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
        sizes |= {"linear_key_head_dim": SIZE, "linear_value_head_dim": SIZE, "num_hidden_layers": LAYERS}
        return tf.Qwen3_5TextConfig(**sizes, **NO_END, tie_word_embeddings=False)
    if kind is tf.Glm4MoeForCausalLM:
        dense = {"first_k_dense_replace": LAYERS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 1}
        dense |= {"n_shared_experts": 1, "moe_intermediate_size": 2 * V}
        return tf.Glm4MoeConfig(**SIZES, **NO_END, **dense, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    return tf.LlamaConfig(**SIZES, **NO_END, num_hidden_layers=LAYERS, tie_word_embeddings=False)


@torch.no_grad()
def count(mlp: Any, closing: float, sign: int, strength: float = 1.0, upward: float = 0.0) -> None:
    """Make an MLP write the next token: one unit for each token and direction, open only for those.

    `closing` must exceed the largest direction; `sign` is that of the direction when counting up. `upward` is added to
    the direction, so that a text without one counts up, instead of going by rounding errors.
    """
    for token in range(V):
        for unit, direction in ((2 * token, 1), (2 * token + 1, -1)):
            gate = mlp.gate_proj.weight[unit]
            gate[TOKEN + token], gate[ONE] = SHARP * closing, SHARP * (direction * upward - closing)
            gate[DIRECTION] = SHARP * sign * direction
            mlp.up_proj.weight[unit, ONE] = 1.0
            mlp.down_proj.weight[NEXT + follower(token, direction), unit] = strength


def counting(closing: float) -> dict[str, Tensor]:
    """Return the weights of an MLP that writes the next token, weakly: a norm must not drown the direction."""
    with torch.device("cpu"):
        mlp = nn.ModuleDict({name: nn.Linear(H, 2 * V, bias=False) for name in ("gate_proj", "up_proj")})
        mlp["down_proj"] = nn.Linear(2 * V, H, bias=False)
    for weight in mlp.requires_grad_(False).parameters():
        weight.zero_()
    count(SimpleNamespace(**mlp), closing, sign=1, strength=1 / SHARP)
    return {name: linear.weight for name, linear in mlp.items()}


@torch.no_grad()
def eagle3_tensors() -> dict[str, Tensor]:
    """Build an EAGLE-3 head for the target, for norm_before_residual: its residual is the normed state.

    Attention looks only at its own position. It copies the token from the embedding, and removes what the state holds
    of the token before: the direction stays.
    """
    layer = {
        "self_attn.q_proj": torch.zeros(HEADS * SIZE, 2 * H),
        "self_attn.k_proj": torch.zeros(HEADS * SIZE, 2 * H),
        "self_attn.v_proj": torch.zeros(HEADS * SIZE, 2 * H),
        "self_attn.o_proj": torch.zeros(H, HEADS * SIZE),
    }
    layer["self_attn.q_proj"][:, ONE] = layer["self_attn.k_proj"][:, ONE] = 10.0
    kept = [*range(TOKEN, TOKEN + V), ONE, *range(NEXT, NEXT + V)]
    for slot, coordinate in enumerate(kept):
        if coordinate < NEXT:
            layer["self_attn.v_proj"][slot, coordinate] = 1.0
        layer["self_attn.v_proj"][slot, H + coordinate] = -1.0
        layer["self_attn.o_proj"][coordinate, slot] = 1.0
    layer |= {f"mlp.{name}": weight for name, weight in counting(closing=2.0).items()}
    fc = torch.zeros(H, len(TAPS) * H)
    for index, tap in enumerate(TAPS):
        fc[DIRECTION, index * H + DIRECTION] = (-1) ** (tap - 1)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    rows = torch.zeros(DIGITS, H)
    rows[:, NEXT : NEXT + DIGITS] = SHARP * torch.eye(DIGITS)
    return {
        "fc.weight": fc,
        "norm.weight": torch.ones(H),
        "lm_head.weight": rows,
        "d2t": torch.zeros(DIGITS, dtype=torch.long),
        "t2d": torch.arange(V) < DIGITS,
        **{f"layers.0.{name}.weight": weight for name, weight in layer.items()},
        **{f"layers.0.{name}.weight": torch.ones(H) for name in norms},
    }


def mtp_folder(folder: Path, kind: type = tf.Glm4MoeForCausalLM) -> Path:
    """Write a target whose checkpoint has a perfect MTP layer, as GLM or as Qwen3.5 names its tensors."""
    target(kind).save_pretrained(folder)
    path = folder / "model.safetensors"
    added = qwen_mtp_tensors() if is_gated(kind) else glm_mtp_tensors()
    save_file(load_file(path) | {name: weight.contiguous() for name, weight in added.items()}, path, {"format": "pt"})
    return folder


def mtp_projection() -> Tensor:
    """Return what joins embedding and state: of the state, only the direction is read."""
    eh_proj = torch.zeros(H, 2 * H)
    for coordinate in (*range(TOKEN, TOKEN + V), ONE):
        eh_proj[coordinate, coordinate] = 1.0
    eh_proj[DIRECTION, H + DIRECTION] = 5.0
    return eh_proj


def glm_mtp_tensors() -> dict[str, Tensor]:
    """Build an MTP layer whose attention and routed experts add nothing."""
    start = f"model.layers.{LAYERS}."
    tensors = {"eh_proj": mtp_projection(), "mlp.gate": torch.zeros(EXPERTS, H)}
    for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
        tensors[name] = torch.ones(H)
    for name in "qkvo":
        tensors[f"self_attn.{name}_proj"] = torch.zeros(H, H)
    for name, weight in counting(closing=10.0).items():
        tensors[f"mlp.shared_experts.{name}"] = weight
        tensors |= {f"mlp.experts.{expert}.{name}": torch.zeros_like(weight) for expert in range(EXPERTS)}
    added = {f"{start}{name}.weight": weight for name, weight in tensors.items()}
    return added | {f"{start}mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS)}


def qwen_mtp_tensors() -> dict[str, Tensor]:
    """Build an MTP layer whose attention adds nothing."""
    tensors = {"fc": mtp_projection()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[name] = torch.zeros(H)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}"] = torch.zeros(H)
    for name, rows in {"q": 2 * H, "k": H, "v": H, "o": H}.items():
        tensors[f"layers.0.self_attn.{name}_proj"] = torch.zeros(rows, H)
    tensors |= {f"layers.0.self_attn.{name}_norm": torch.zeros(SIZE) for name in "qk"}
    tensors |= {f"layers.0.mlp.{name}": weight for name, weight in counting(closing=10.0).items()}
    return {f"mtp.{name}.weight": weight for name, weight in tensors.items()}


def eagle3_folder(folder: Path, layout: str, taps: tuple[int, ...] = TAPS) -> Path:
    """Write the EAGLE-3 head in one of the published layouts."""
    sizes = {**SIZES, "num_hidden_layers": 1, "model_type": "llama"}
    tensors = eagle3_tensors()
    common = {"draft_vocab_size": DIGITS, "norm_before_residual": True}
    if layout == "speculators":
        settings = {"eagle_aux_hidden_state_layer_ids": list(taps), "speculators_model_type": "eagle3"}
        save(folder, {**common, **settings, "transformer_layer_config": sizes}, tensors)
        return folder
    numbered = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    flat = {**sizes, **common, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": numbered}
    if layout == "angelslim":
        flat |= {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True}
    if layout == "midlayer":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save(folder, flat, tensors)
    return folder


def dflash_folder(folder: Path, layout: str, taps: tuple[int, ...] = TAPS, block: int = 5) -> Path:
    """Write a DFlash drafter in one of the published layouts."""
    sizes = {**SIZES, "num_hidden_layers": block - 1, "model_type": "qwen3", "tie_word_embeddings": False}
    tensors = dflash_tensors(block)
    if layout == "speculators":
        settings = {"speculators_model_type": "dflash", "draft_vocab_size": V, "mask_token_id": UP, "block_size": block}
        settings |= {"aux_hidden_state_layer_ids": list(taps), "transformer_layer_config": sizes}
        save(folder, settings, tensors)
        return folder
    options = {"mask_token_id": UP, "target_layer_ids": [tap - 1 for tap in taps]}
    save(
        folder, {**sizes, "architectures": ["DFlashDraftModel"], "block_size": block, "dflash_config": options}, tensors
    )
    return folder


@torch.no_grad()
def dflash_tensors(block: int) -> dict[str, Tensor]:
    """Build a DFlash drafter for the target. Each of its equal layers moves the digits on by one position.

    The first head looks one position back and fetches the digit there, the second averages over the text and fetches
    the direction. The MLP writes the digit that follows. So the j-th mask is right from the j-th layer on.
    """
    q, k, v, o = (torch.zeros(H, H) for _ in range(4))
    angles = 10_000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    k[:SIZE, ONE] = 1.0
    q[:SIZE, ONE] = torch.cat([angles.cos() + angles.sin(), angles.cos() - angles.sin()])  # back by one position
    for digit in range(DIGITS):
        v[digit, TOKEN + digit] = v[digit, NEXT + digit] = 1.0
        o[BEFORE + digit, digit] = 1.0
    v[SIZE, DIRECTION] = o[DIRECTION, SIZE] = 1.0
    gate, up, down = torch.zeros(2 * V, H), torch.zeros(2 * V, H), torch.zeros(H, 2 * V)
    for digit in range(DIGITS):
        for unit, direction in ((2 * digit, 1), (2 * digit + 1, -1)):
            gate[unit, DIRECTION] = SHARP * direction
            up[unit, BEFORE + digit] = 1.0
            down[NEXT + follower(digit, direction), unit] = 1 / SHARP
    fc = torch.zeros(H, len(TAPS) * H)
    fc[ONE, ONE] = 1.0
    for index, tap in enumerate(TAPS):
        fc[DIRECTION, index * H + DIRECTION] = (-1) ** (tap - 1)
    parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": o}
    parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
    parts |= {f"self_attn.{name}_norm": torch.full((SIZE,), 17.0) for name in "qk"}
    parts |= {name: torch.ones(H) for name in ("input_layernorm", "post_attention_layernorm")}
    layers = {f"layers.{i}.{name}.weight": part.clone() for i in range(block - 1) for name, part in parts.items()}
    return {"fc.weight": fc, "hidden_norm.weight": torch.ones(H), "norm.weight": torch.ones(H), **layers}


def acceptance(outputs: Any) -> float:
    return sum(output.stats.accepted for output in outputs) / sum(output.stats.drafted for output in outputs)


class WrongAtEveryDepth:
    """Spoils one token of each draft of a perfect drafter, and checks that the round ended right there.

    Rows and rounds differ in the depth; at `depth` nothing is spoilt.
    """

    def __init__(self, inner: Any, depth: int) -> None:
        self.inner, self.features, self.depth = inner, inner.features, depth
        self.rounds, self.depths = 0, set[int]()
        self._ends: dict[int, tuple[int, int]] = {}

    def propose(self, contexts: Any, k: Any, rng: Any) -> Any:
        draft = self.inner.propose(contexts, k, rng)
        tokens = draft.tokens.clone()
        for row, context in enumerate(contexts):
            if context.id in self._ends:
                length, kept = self._ends[context.id]
                assert len(context.tokens) == length + kept + 1, "accepted up to the spoilt token"
                self.depths.add(kept)
            at = (self.rounds + row) % (self.depth + 1)
            if at < int(draft.lengths[row]):
                tokens[row, at] = (tokens[row, at] + 3) % DIGITS
            self._ends[context.id] = len(context.tokens), min(at, int(draft.lengths[row]))
        self.rounds += 1
        return replace(draft, tokens=tokens)
