"""Training on several ranks with different examples: averaged gradients, and a shared optimiser state.

Source: Li et al., PyTorch Distributed (2020), for buckets that are reduced during the backward pass;
Rajbhandari et al., ZeRO (2020), section 5.1, for the shares of the optimiser's state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels.runtime.dtypes import acc_dtype

from ..functions.subscripts import piece
from ..module import Parameter
from ..optim import Optimizer
from ..scalars.modes import modes, no_grad
from ..tensor import Tensor
from ..training.clipping import clip_grad_norm_
from .exchange import message, received
from .group import Group, Transfer

#: Bytes of a bucket of gradients, on the host and on a device.  In a bucket of this size, the latency is
#: negligible compared with the transfer.
BUCKET_BYTES = {True: 4 << 20, False: 24 << 20}


def check_same_model(parameters: Sequence[Parameter], group: Group) -> None:
    """Check that all ranks have the same parameters, bit for bit.

    Raises:
        ValueError: If they differ; the message names the first rank whose parameters do.
    """
    code = 0
    for p in parameters:
        array = np.ascontiguousarray(p.value.to_numpy())
        code = zlib.crc32(repr((array.shape, str(array.dtype))).encode(), code)
        code = zlib.crc32(array.reshape(-1).view(np.uint8).data, code)
    codes = np.empty((group.size, 1), np.int64)
    group.host.all_gather(np.array([code], np.int64), codes).wait()
    if (other := np.flatnonzero(codes[:, 0] != codes[0, 0])).size:
        raise ValueError(
            f"all ranks must begin with the same parameters, and those of rank {other[0]} are not those of "
            "rank 0; call manual_seed with the same seed before the model is made, or load the same file"
        )


class _Bucket:
    """Gradients that travel together.

    Args:
        parameters: The parameters, in the order in which their gradients are expected.
        group: The ranks.
    """

    def __init__(self, parameters: Sequence[Parameter], group: Group):
        self.parameters, self._group = parameters, group
        self.left = len(parameters)
        like: Tensor = parameters[0].value
        sizes = [p.value.size for p in parameters]
        self._places = [
            range(stop - size, stop) for size, stop in zip(sizes, np.cumsum(sizes), strict=True)
        ]
        self._flat = like.empty((sum(sizes),), acc_dtype(like.dtype))
        self._array: Any = None
        self._transfer: Transfer | None = None

    def begin(self) -> None:
        """Begin to average the gradients of all ranks; a missing gradient counts as 0."""
        for p, place in zip(self.parameters, self._places, strict=True):
            grad: Tensor | None = p.value.grad
            grad = self._flat.zeros((len(place),)) if grad is None else grad.contiguous()
            grad = grad.view(len(place))
            if not grad.backend.cuda:  # where a copy converts
                grad = grad.to(self._flat.dtype)
            grad.f.id_map(grad, piece(self._flat, 0, place))
        self._array = message(self._flat, self._group)
        self._transfer = self._group.all_reduce(self._array, "mean")

    def wait(self) -> None:
        """Wait for the averages."""
        assert self._transfer is not None, "it has begun"
        self._transfer.wait()

    def finish(self) -> None:
        """Replace the gradients by the averages."""
        average = received(self._array, self._flat)
        for p, place in zip(self.parameters, self._places, strict=True):
            own: Any = piece(average, 0, place)
            p.value.grad = own.view(*p.value.shape)


class GradientAverage:
    """Averages the gradients of all ranks in buckets, during the backward pass.

    If all ranks have equally many examples, the average of their mean losses is the mean loss over all
    examples.  Training then equals training on one device with all examples, up to rounding.  The averages
    of 16-bit gradients are float32.

    Args:
        parameters: Parameters of the model, the same on all ranks.
        group: The ranks.
        bucket_bytes: Bytes of gradients that are sent at a time; a larger gradient is sent alone.  None
            means 4 MiB on the host and 24 MiB on devices.

    Raises:
        ValueError: If the parameters of the ranks differ.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: Group, bucket_bytes: int | None = None
    ):
        self._group = group
        self._bucket_bytes = BUCKET_BYTES[group.on_host] if bucket_bytes is None else bucket_bytes
        self._parameters = [*parameters]
        check_same_model(self._parameters, group)

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Average the gradients of the backward pass that runs in this context.

        A backward pass outside the context adds to the gradients of this rank only.  To accumulate
        gradients over several batches, run only the last backward pass within the context.
        """
        buckets = self._buckets()
        bucket_of = {id(p.value): bucket for bucket in buckets for p in bucket.parameters}
        begun = 0

        def ready(leaf: Any) -> None:
            nonlocal begun
            if (bucket := bucket_of.get(id(leaf))) is None:
                return
            bucket.left -= 1
            # In the same order on all ranks, as collective operations have to be.
            while begun < len(buckets) and buckets[begun].left == 0:
                buckets[begun].begin()
                begun += 1

        before, modes.leaf_is_done = modes.leaf_is_done, ready
        try:
            yield
        finally:
            modes.leaf_is_done = before
        for bucket in buckets[begun:]:
            bucket.begin()
        # All waits before the first kernel: each between two kernels would cut a captured step once more.
        for bucket in buckets:
            bucket.wait()
        for bucket in buckets:
            bucket.finish()

    def _buckets(self) -> list[_Bucket]:
        """Return empty buckets, the last parameters first, because their gradients are ready first."""
        found: list[list[Parameter]] = []
        size = math.inf
        for p in reversed(self._parameters):
            own = p.value.size * acc_dtype(p.value.dtype).itemsize
            is_alike = bool(found) and found[-1][0].value.dtype == p.value.dtype
            if size + own > self._bucket_bytes or not is_alike:
                found.append([])
                size = 0
            found[-1].append(p)
            size += own
        return [_Bucket(bucket, self._group) for bucket in found]


class ShardedOptimizer(Optimizer):
    """An optimiser whose state is spread over the ranks (ZeRO-1).

    Each rank updates a share of the parameters.  Gradients must be the same on all ranks, as
    :class:`GradientAverage` makes them.

    Args:
        parameters: Parameters of the model, the same on all ranks.
        group: The ranks.
        make: The class of the optimiser, such as :class:`minitorch.AdamW`: ``make(parameters, **options)``.
        max_norm: Maximum norm of all gradients together; None does not clip.
        options: Options of the optimiser.

    Attributes:
        own: The optimiser of this rank's share.
    """

    def __init__(
        self, parameters: Sequence[Parameter], group: Group, make: Callable[..., Optimizer], *,
        max_norm: float | None = None, **options: Any,
    ):  # fmt: skip
        super().__init__([*parameters])
        if self._groups:
            raise TypeError(
                "ShardedOptimizer takes no groups of parameters; make one for each group, and clip the "
                "gradients of all with clip_grad_norm_"
            )
        self._group, self._max_norm = group, max_norm
        self._shares: list[list[Parameter]] = [[] for _ in range(group.size)]
        sizes = [0] * group.size
        for p in sorted(self.parameters, key=lambda p: -p.value.size):
            smallest = sizes.index(min(sizes))
            self._shares[smallest].append(p)
            sizes[smallest] += p.value.size
        self.own = make(self._shares[group.rank], **options)
        places = {id(p): str(place) for place, p in enumerate(self.parameters)}
        self._places = [places[id(p)] for p in self._shares[group.rank]]  # as its state names them

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.own.lr  # type: ignore[attr-defined]

    @lr.setter
    def lr(self, value: float) -> None:
        self.own.lr = value  # type: ignore[attr-defined]

    @property
    def param_groups(self) -> list[Any]:
        """The group of this rank's share."""
        return self.own.param_groups

    def zero_grad(self) -> None:
        """Drop the gradient of every parameter."""
        for p in self.parameters:
            p.value.grad = None

    @no_grad()
    def step(self) -> None:
        """Update this rank's share of the parameters, and receive the others from their ranks."""
        if self._max_norm is not None:
            clip_grad_norm_(self.parameters, self._max_norm)
        self.own.step()
        sent = []
        for owner, share in enumerate(self._shares):
            for p in share:
                array = message(p.value.detach(), self._group)
                sent.append((owner, p, array, self._group.broadcast(array, owner)))
        for owner, p, array, transfer in sent:
            transfer.wait()
            if owner != self._group.rank:
                new = received(array, p.value).view(*p.value.shape)
                p.value.f.id_map(new, p.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's share; see :meth:`minitorch.AdamW.state_dict`.

        Its tensors are named by the index of their parameter among all parameters, so that the states of
        all ranks together are the state of a run on one device.
        """
        state = {}
        for name, value in self.own.state_dict().items():
            kind, _, place = name.partition(".")
            state[f"{kind}.{self._places[int(place)]}" if place else name] = value
        if self._max_norm is not None and "max_norm" in state:
            state["max_norm"] = self._max_norm
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`, or a state of all parameters from one device."""
        here = {place: str(i) for i, place in enumerate(self._places)}
        others = {str(place) for place in range(len(self.parameters))} - here.keys()
        own = {}
        for name, value in state.items():
            kind, _, place = name.partition(".")
            if place not in others:
                own[f"{kind}.{here[place]}" if place in here else name] = value
        if self._max_norm is not None and "max_norm" in own:
            own["max_norm"] = math.inf  # gradients are clipped here, by the norm of all of them
        self.own.load_state_dict(own)

    def _numbers(self) -> dict[str, Any]:
        return self.own._numbers()
