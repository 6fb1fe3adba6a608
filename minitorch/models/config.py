"""The options of transformers, each declared, documented and checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from functools import wraps
from typing import Any

import numpy.typing as npt

from kernels.common.arguments import flag, not_negative, one_of, shown, whole

from ..attention.approximate.choices import APPROXIMATIONS  # beyond module 5
from ..backends.matmul_precision import Precision, find_precision
from ..layers.rms_norm import RMSNorm
from ..modules_basic import LayerNorm1d
from ..nn import switch
from ..tensor_ops import SimpleBackend, TensorBackend
from .rotary import Rotary

ATTENTIONS = (
    "flash",
    "naive",
    *APPROXIMATIONS,  # beyond module 5
)
#: Norms by name, GPT-2's and Llama's.
NORMS: dict[str, type[LayerNorm1d] | type[RMSNorm]] = {"layer": LayerNorm1d, "rms": RMSNorm}
FEED_FORWARDS = ("gelu", "swiglu")


@dataclass(frozen=True)
class Config:
    """The options of transformers.

    Each module takes those that its signature names, or a whole ``Config`` in their place:
    ``TransformerLayer(8, 2, bias=False)`` and ``TransformerLayer(Config(8, 2, bias=False))`` are equal.

    Args:
        n_embd: Width of the model, a multiple of n_head unless ``head_dim`` is given.
        n_head: Number of heads.
        causal: Whether a position attends only to itself and earlier positions.
        p_dropout: Dropout probability of the embeddings and of the output of each branch.
        ln_eps: Added to the variance, or to the mean square, by the norms.
        bias: Whether the linear layers have a bias.
        backend: Backend of the parameters; ``SimpleBackend`` also when None.
        use_fused_kernel: Ignored; for code of the published course.
        use_flash_attention: The published course's flag; True selects "flash".
        attention: "flash", the fused kernel; "naive", composed of tensor operations; or an approximation:
            "linformer", "linear", "performer", "local", "reformer", "smyrf" or "block_sparse"; see
            :mod:`minitorch.attention`.  A cache needs one of the first two, packed sequences the first.
        attention_dropout: Dropout probability of the attention weights, in training.
        attention_options: Options of an approximation, by name, such as ``{"num_features": 128}``.
        n_kv_head: Number of heads of keys and values, a divisor of n_head; each of them is used by
            a group of query heads. n_head when None. A smaller number needs flash or naive
            attention.
        head_dim: Size of a head; n_embd / n_head when None.
        rotary: Rotary positions, which rotate queries and keys; None if the model adds position
            embeddings.
        window: Number of positions that a position attends to, itself and those just before it, as in
            Mistral; None for no limit.
        sinks: Whether each head learns a logit that only the softmax's denominator contains, so that a
            position may attend to nothing, as in gpt-oss.
        middle_dim: Width of the feed-forward network.
        norm: "layer", :class:`minitorch.LayerNorm1d`; or "rms", :class:`minitorch.RMSNorm`.
        feed_forward: "gelu", :class:`FeedForward`; or "swiglu", :class:`GatedFeedForward`.
        norm_first: True places the norms before the two branches, as in GPT-2; False places them
            after the residual connections, as in BERT.
        dtype: Dtype of the parameters; the default dtype when None.
        norm_dtype: Dtype of the parameters of the norms; ``dtype`` when None.
        n_vocab: Number of tokens in the vocabulary of a model.
        n_positions: Maximum length of a sequence.
        n_layer: Number of transformer layers, named ``t_layer_1`` and so on.
        precision: "float32", "tf32" or "bfloat16", instead of a dtype: the formats in which a whole model
            stores, multiplies and sums; see :class:`minitorch.Precision`.
        recompute: Keep only the inputs of the layers for the backward pass, and recompute the rest; see
            :func:`minitorch.checkpoint`.

    Raises:
        TypeError: If an option has the wrong type, or there are ``attention_options`` without an
            approximation.
        ValueError: If a size is below 1, n_head does not divide n_embd, n_kv_head does not divide n_head,
            there is no such attention, norm, feed-forward network or precision, or a dtype is given besides
            a precision; also for groups of heads, a window or sinks with an approximation, and for a window
            without ``causal``.
    """

    n_embd: int
    n_head: int = 1
    causal: bool = True
    p_dropout: float = 0.1
    ln_eps: float = 1e-5
    bias: bool = True
    backend: TensorBackend = SimpleBackend
    use_fused_kernel: InitVar[bool] = False
    use_flash_attention: InitVar[bool] = False
    attention: str = "flash"
    attention_dropout: float = 0.0
    attention_options: Mapping[str, Any] | None = None
    n_kv_head: int | None = None
    head_dim: int | None = None
    rotary: Rotary | None = None
    window: int | None = None
    sinks: bool = False
    middle_dim: int = 256
    norm: str = "layer"
    feed_forward: str = "gelu"
    norm_first: bool = True
    dtype: npt.DTypeLike | None = None
    norm_dtype: npt.DTypeLike | None = None
    n_vocab: int = 1
    n_positions: int = 1
    n_layer: int = 4
    precision: str | None = None
    recompute: bool = False

    def __post_init__(self, use_fused_kernel: bool, use_flash_attention: bool) -> None:
        optional = (
            name for name in ("n_kv_head", "head_dim", "window") if vars(self)[name] is not None
        )
        kept: dict[str, Any] = {
            name: whole(name, getattr(self, name), 1)
            for name in ("n_vocab", "n_positions", "n_layer", "n_embd", "n_head", *optional)
        }
        for name in ("sinks", "norm_first", "recompute"):
            kept[name] = flag(name, getattr(self, name))
        names = {"attention": ATTENTIONS, "norm": NORMS, "feed_forward": FEED_FORWARDS}
        kept |= {name: one_of(name, getattr(self, name), names[name]) for name in names}
        if flag("use_flash_attention", use_flash_attention):
            kept["attention"] = "flash"
        kept["causal"] = switch("causal", self.causal)
        kept["backend"] = SimpleBackend if self.backend is None else self.backend
        kept["attention_dropout"] = not_negative(
            "attention_dropout", self.attention_dropout, 1.0, "; 0 turns dropout off"
        )
        if (own := self.policy) is not None:
            is_own = self.dtype is own.dtype and self.norm_dtype is own.norms  # of a copy
            if self.dtype is not None and not is_own:
                raise ValueError(
                    f"precision={self.precision!r} determines the dtype of the parameters, got "
                    f"dtype={shown(self.dtype)} as well; leave one of them out"
                )
            kept |= {"dtype": own.dtype, "norm_dtype": own.norms}
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        self._check_attention()

    def _check_attention(self) -> None:
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}; each head has "
                "an equal share of the width"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_kv_head must divide n_head, got {self.n_kv_head} and {self.n_head}; each head of keys "
                "and values serves equally many query heads"
            )
        if not isinstance(self.attention_options, (Mapping, type(None))):
            raise TypeError(
                f"attention_options must be a dict or None, got {shown(self.attention_options)}"
            )
        if self.window is not None and not self.causal:
            raise ValueError("a window needs causal attention; build the layer with causal=True")
        if self.is_exact:
            if self.attention_options:
                raise TypeError(
                    f"attention_options belong to the approximations {ATTENTIONS[2:]}, and this attention "
                    f"is {self.attention}; leave them out"
                )
        elif self.kv_heads != self.n_head:
            raise ValueError(
                f"groups of heads need attention 'flash' or 'naive', got {self.attention!r} and n_kv_head "
                f"{self.n_kv_head}; leave n_kv_head out"
            )
        elif self.sinks or self.window is not None:
            raise ValueError(
                f"window and sinks need attention 'flash' or 'naive', got {self.attention!r}; leave them "
                "out (the window of 'local' is one of its attention_options)"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the attention is no approximation."""
        return self.attention in ("flash", "naive")

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def policy(self) -> Precision | None:
        """The policy that ``precision`` names."""
        return None if self.precision is None else find_precision(self.precision)

    def make_norm(self) -> LayerNorm1d | RMSNorm:
        """Return a new norm."""
        dtype = self.dtype if self.norm_dtype is None else self.norm_dtype
        return NORMS[self.norm](self.n_embd, self.ln_eps, self.backend, dtype)


def configured(
    needed: str, optional: str, named: str = "", **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let callers of ``__init__(self, config, …)`` pass options of a :class:`Config` in its place.

    Args:
        needed: Names of the options that must be passed, by position or by name.
        optional: Options that may be, in the order of the published course.
        named: Options that may be passed by name only.  Parameters after ``config`` need not be in any of
            the three.
        defaults: Values of options that differ from the defaults of Config.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        this, _, *own = inspect.signature(init).parameters.values()
        known = {p.name: p for p in (*inspect.signature(Config).parameters.values(), *own)}
        known |= {name: known[name].replace(default=value) for name, value in defaults.items()}
        known |= {name: known[name].replace(default=this.empty) for name in needed.split()}
        places = [*needed.split(), *optional.split()]
        others = [*named.split(), *(p.name for p in own if p.name not in places)]
        signature = inspect.Signature([
            this, *(known[name].replace(kind=this.kind) for name in places),
            *(known[name].replace(kind=this.KEYWORD_ONLY) for name in others),
        ])  # fmt: skip

        @wraps(init)
        def build(self: Any, *args: Any, **options: Any) -> None:
            if "config" in options or (args and isinstance(args[0], Config)):
                return init(self, *args, **options)
            try:
                values = {**defaults, **signature.bind(self, *args, **options).arguments}
            except TypeError as error:
                names = ", ".join([*places, *others])
                raise TypeError(
                    f"{type(self).__name__}: {error}; its options are {names}"
                ) from None
            del values[this.name]
            kept = {p.name: values.pop(p.name) for p in own if p.name in values}
            return init(self, Config(**values), **kept)

        build.__signature__ = signature  # type: ignore[attr-defined]
        return build

    return decorate
