"""The options of transformers, each declared, documented and checked once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import wraps
from typing import Any

import numpy.typing as npt

from kernels.common.arguments import flag, not_negative, one_of, whole

from ..attention.approximate.choices import APPROXIMATIONS  # beyond module 5
from ..layers.checks import switch
from ..modules_basic import LayerNorm1d
from ..tensor_ops import SimpleBackend, TensorBackend
from .variants import Variants  # beyond module 5

ATTENTIONS = (
    "flash",
    "naive",
    *APPROXIMATIONS,  # beyond module 5
)


@dataclass(frozen=True)
class Config(
    Variants,  # beyond module 5
):
    """The options of transformers with the structure of GPT-2.

    Each module takes the options that its signature names, or a whole ``Config`` instead of them:
    ``TransformerLayer(8, 2, bias=False)`` and ``TransformerLayer(Config(8, 2, bias=False))`` are equal.

    Args:
        n_embd: Width of the model, a multiple of n_head.
        n_head: Number of heads.
        causal: Whether a position attends only to itself and earlier positions.
        p_dropout: Dropout probability of the embeddings and of the output of each branch.
        ln_eps: Added to the variance, or to the mean square, by the norms.
        bias: Whether the linear layers have a bias.
        backend: Backend of the parameters; ``SimpleBackend`` also when None.
        use_fused_kernel: Ignored; for code of the published course.
        use_flash_attention: The published course's flag; True selects "flash".
        attention: "flash", the fused kernel; "naive", composed of tensor operations; or the name of an
            approximation of :mod:`minitorch.attention`.  A cache needs "flash" or "naive"; packed
            sequences need "flash".
        attention_dropout: Dropout probability of the attention weights, in training.
        middle_dim: Width of the feed-forward network.
        dtype: Dtype of the parameters; the default dtype when None.
        n_vocab: Number of tokens in the vocabulary of a model.
        n_positions: Maximum length of a sequence.
        n_layer: Number of transformer layers, named ``t_layer_1`` and so on.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If a size is below 1, n_head does not divide n_embd, or there is no such attention.
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
    middle_dim: int = 256
    dtype: npt.DTypeLike | None = None
    n_vocab: int = 1
    n_positions: int = 1
    n_layer: int = 4

    def __post_init__(self, use_fused_kernel: bool, use_flash_attention: bool) -> None:
        kept: dict[str, Any] = {
            name: whole(name, getattr(self, name), 1)
            for name in ("n_vocab", "n_positions", "n_layer", "n_embd", "n_head")
        }
        kept["attention"] = one_of("attention", self.attention, ATTENTIONS)
        if flag("use_flash_attention", use_flash_attention):
            kept["attention"] = "flash"
        kept["causal"] = switch("causal", self.causal)
        kept["backend"] = SimpleBackend if self.backend is None else self.backend
        kept["attention_dropout"] = not_negative(
            "attention_dropout", self.attention_dropout, 1.0, "; 0 turns dropout off"
        )
        kept |= self.checked_variants(kept["attention"])  # beyond module 5
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        shares_width = True
        shares_width = self.head_dim is None  # beyond module 5
        if shares_width and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}; each head has "
                "an equal share of the width"
            )

    @property
    def head_size(self) -> int:
        """Size of a head."""
        if self.head_dim is not None:  # beyond module 5
            return self.head_dim
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        if self.n_kv_head is not None:  # beyond module 5
            return self.n_kv_head
        return self.n_head

    def make_norm(self) -> Any:
        """Return a new norm."""
        if self.norm != "layer" or self.norm_dtype is not None:  # beyond module 5
            return self.make_other_norm()
        return LayerNorm1d(self.n_embd, self.ln_eps, self.backend, self.dtype)


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
