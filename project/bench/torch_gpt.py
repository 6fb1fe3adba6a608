"""The GPT in PyTorch, eager: the same weights, the same arithmetic, PyTorch's own attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import minitorch
from kernels.runtime.dtypes import FLOAT32

#: The peer whose attention is composed of products and a softmax.
MATH = "PyTorch math"
#: How the attention of each peer is called, and which of PyTorch's backends computes it in float32: its
#: flash kernels on CUDA take 16-bit numbers only, and the memory-efficient one is its fused kernel there.
BACKENDS = {
    "cpu": {MATH: "MATH", "PyTorch flash": "FLASH_ATTENTION"},
    "cuda": {MATH: "MATH", "PyTorch efficient": "EFFICIENT_ATTENTION"},
}
#: A peer that is none of them: whichever fused backend PyTorch prefers for the device and the dtype.
FUSED = "PyTorch fused"
FUSED_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def torch_peers(device: str) -> list[str]:
    """Return the names of the peers: none where PyTorch is missing, or cannot use the device."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError:
        return []
    return [] if device == "cuda" and not torch.cuda.is_available() else list(BACKENDS[device])


class TorchGPT:
    """A copy of a model, with its optimiser.

    Weights are float32, or in float64 they and all else are.  In bfloat16 PyTorch's autocast rounds what
    products take, and keeps sums, layer norms, the loss and the residual stream in float32.
    """

    def __init__(
        self, model: minitorch.DecoderLM | minitorch.EncoderLM, name: str, device: str, lr: float,
        beta2: float, weight_decay: float, precision: str = "float32", clip: float | None = None,
        parts: int = 1, compiled: bool = False, attend: Any = None,
    ):  # fmt: skip
        import torch  # type: ignore[import-not-found]
        from torch.nn import attention  # type: ignore[import-not-found]

        self._attend_by = attend or torch.nn.functional.scaled_dot_product_attention
        self.torch, self.device, self.clip, self.parts = torch, device, clip, parts
        kind = torch.float64 if precision == "float64" else torch.float32
        self.layers, self.heads, self.eps = model.layer_names, model.n_head, model.ln.eps
        self.weights = {
            key: torch.nn.Parameter(
                torch.tensor(p.value.detach().to(FLOAT32).to_numpy(), dtype=kind, device=device)
            )
            for key, p in model.named_parameters()
        }
        chosen = FUSED_BACKENDS if name == FUSED else (BACKENDS[device].get(name, name),)
        backends = [getattr(attention.SDPBackend, one) for one in chosen]
        self._attention = lambda: attention.sdpa_kernel(backends)
        self._rounding = (
            (lambda: torch.autocast(device, dtype=torch.bfloat16))
            if precision == "bfloat16"
            else nullcontext
        )
        groups = [
            {"params": [w for w in self.weights.values() if w.dim() >= 2], "weight_decay": weight_decay},
            {"params": [w for w in self.weights.values() if w.dim() < 2], "weight_decay": 0.0},
        ]  # fmt: skip
        fused = True if device == "cuda" else None  # its fastest; elsewhere its own choice
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=fused)
        self._score = self.loss
        if compiled:
            torch._dynamo.reset()  # after a model of another size it would compile for any size
            # Where a version of PyTorch breaks the graph, the functions of a layer are compiled for each.
            torch._dynamo.config.recompile_limit = 8 * len(self.layers)
            self._score = torch.compile(self.loss)

    def share_with_all_ranks(self) -> None:
        """Average gradients over PyTorch's process group, during the backward pass."""
        module = self.torch.nn.Module()
        for name, weight in self.weights.items():
            module.register_parameter(name.replace(".", "_"), weight)
        module.forward = self.loss
        self._score = self.torch.nn.parallel.DistributedDataParallel(
            module, gradient_as_bucket_view=True
        )

    def _linear(self, x: Any, name: str) -> Any:
        weights, bias = self.weights[f"{name}.weights"], self.weights.get(f"{name}.bias")
        return self.torch.nn.functional.linear(x, weights.T, bias)  # adds the bias in the product

    def _norm(self, x: Any, name: str) -> Any:
        weights, bias = (self.weights[f"{name}.{part}"] for part in ("weights", "bias"))
        return self.torch.nn.functional.layer_norm(x, x.shape[-1:], weights, bias, self.eps)

    def _attend(self, x: Any, name: str, cache: TorchCache | None = None) -> Any:
        batch, seq, width = x.shape
        q, k, v = (
            self._linear(x, f"{name}.{part}_projection")
            .view(batch, seq, self.heads, width // self.heads)
            .transpose(1, 2)
            for part in "qkv"
        )  # (batch, heads, seq, head_dim) each
        if cache is not None:
            k, v = cache.append(name, k, v)
        # A single row comes last and sees all columns.
        out = self._attend_by(q, k, v, is_causal=seq > 1)
        return self._linear(
            out.transpose(1, 2).reshape(batch, seq, width), f"{name}.out_projection"
        )

    def logits(self, ids: Any, cache: TorchCache | None = None) -> Any:
        """Return the scores of the tokens after (batch, seq) ids: (batch, seq, n_vocab)."""
        functional, start = self.torch.nn.functional, 0 if cache is None else cache.length
        table = self.weights["token_embeddings.weights"]
        x = functional.embedding(ids, table)  # (batch, seq, width)
        x = x + self.weights["position_embeddings.weights"][start : start + ids.shape[1]]
        for name in self.layers:
            x = x + self._attend(self._norm(x, f"{name}.ln_1"), f"{name}.attention", cache)
            middle = self._linear(self._norm(x, f"{name}.ln_2"), f"{name}.ff.linear_in")
            x = x + self._linear(
                functional.gelu(middle, approximate="tanh"), f"{name}.ff.linear_out"
            )
        x = self._norm(x, "ln")
        if cache is not None:
            cache.length += ids.shape[1]
        tied = "lm_head.weights" not in self.weights
        return x @ table.T if tied else self._linear(x, "lm_head")

    def place(self, ids: Any) -> Any:
        """Return an array of ids as a tensor on the device; a tensor that is there stays as it is."""
        return self.torch.as_tensor(ids, device=self.device)

    def loss(self, inputs: Any, targets: Any) -> Any:
        """Return the mean cross entropy of (batch, seq) ids, arrays or tensors, nats per token."""
        ids, targets = self.place(inputs), self.place(targets)
        scores = self.logits(ids).flatten(0, 1)
        return self.torch.nn.functional.cross_entropy(scores, targets.flatten())

    def gradients(self, inputs: Any, targets: Any) -> Any:
        """Leave the gradients of a batch at the weights; return its loss, unread."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.parts == 1:  # which is timed: not a launch more than a step takes
            return self._backward(inputs, targets)
        ids, wanted = (self.place(x).chunk(self.parts) for x in (inputs, targets))
        parts = zip(ids, wanted, strict=True)
        return sum(self._backward(*part, share=len(part[0]) / len(inputs)) for part in parts)

    def _backward(self, inputs: Any, targets: Any, share: float | None = None) -> Any:
        with self._attention():
            with self._rounding():
                loss = self._score(inputs, targets)
            loss = loss if share is None else loss * share
            loss.backward()
        return loss.detach()

    def step(self, inputs: Any, targets: Any, lr: float) -> Any:
        """Take one step; return the loss before it, unread."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.gradients(inputs, targets)
        if self.clip is not None:
            self.torch.nn.utils.clip_grad_norm_(self.weights.values(), self.clip)
        self.optimizer.step()
        return loss


class TorchCache:
    """Keys and values of the tokens so far, in memory for all that may come."""

    def __init__(self, gpt: TorchGPT, capacity: int):
        width = gpt.weights["token_embeddings.weights"].shape[1]
        shape = 1, gpt.heads, capacity, width // gpt.heads
        self.kept = {
            f"{name}.attention": [gpt.torch.zeros(shape, device=gpt.device) for _ in "kv"]
            for name in gpt.layers
        }
        self.length = 0

    def append(self, name: str, k: Any, v: Any) -> list[Any]:
        """Keep new keys and values of a layer; return all of its, (1, heads, length, head_dim)."""
        stop = self.length + k.shape[2]
        for kept, new in zip(self.kept[name], (k, v), strict=True):
            kept[:, :, self.length : stop] = new
        return [kept[:, :, :stop] for kept in self.kept[name]]
