"""minitorch: automatic differentiation from scalars to a transformer, with its own fused attention kernels.

The names below are those of the published course, so that its tests and scripts run unchanged.  A line that
is marked ``beyond module N`` is left out of the starter trees of modules 0 to N.  A line that is marked
``until module N`` is left out of the starter trees after module N.
"""

from .doctor import entrance as _entrance  # beyond module 5

# isort: split
from numpy import float16, float32, float64  # beyond module 1

from kernels.runtime.dtypes import BFLOAT16  # beyond module 1
from kernels.runtime.jit import get_num_threads, set_num_threads  # beyond module 2

from . import (
    compat,  # beyond module 5
    fast_ops,  # beyond module 1
    operators,
    scalar,  # beyond module 0, until module 1
    scalar_functions,  # beyond module 0, until module 1
    tensor_data,  # beyond module 1
    tensor_functions,  # beyond module 1
    testing,  # beyond module 0, until module 3
)
from .accelerated import plain  # beyond module 5
from .attention.naive import naive_attention  # beyond module 4
from .autodiff import (  # beyond module 0
    Context,
    History,
    Variable,
    backpropagate,
    central_difference,
    topological_sort,
)
from .backends.cuda_practice import mm_practice, sum_practice  # beyond module 2, until module 3
from .backends.matmul_precision import (  # beyond module 5
    Precision,
    get_matmul_precision,
    matmul_precision,
    set_matmul_precision,
)
from .compat.tensor_methods import (  # beyond module 5
    Attn_Softmax,
    Flash_Attn,
    Flash_Attn2,
    Flash_Attn_Causal,
    LayerNorm,
    LayerNorm1dFused,
)
from .cuda_kernel_ops import CudaKernelOps  # beyond module 5
from .cuda_ops import (  # beyond module 1
    CudaBackend,
    CudaOps,
)
from .datasets import datasets  # until module 3
from .drawing.expression_graph import ExpressionGraph  # beyond module 5
from .fast_conv import Conv1dFun, Conv2dFun, conv1d, conv2d  # beyond module 3, until module 4
from .fast_ops import FastBackend, FastOps  # beyond module 1
from .functions.base import Function  # beyond module 1
from .functions.flash_attention import FlashAttention  # beyond module 4
from .layers.containers import ModuleDict, ModuleList, Sequential  # beyond module 5
from .layers.cross_entropy import cross_entropy  # beyond module 5
from .layers.linear import linear  # beyond module 3
from .layers.linear_cross_entropy import linear_cross_entropy  # beyond module 4
from .layers.residual_layer_norm import residual_layer_norm  # beyond module 5
from .layers.rms_norm import RMSNorm, rms_norm  # beyond module 5
from .models.config import Config  # beyond module 4
from .models.encoder_lm import EncoderClassifier, EncoderLM  # beyond module 5
from .models.engine import Engine  # beyond module 5
from .models.kv_cache import KVCache, LayerCache  # beyond module 5
from .models.reversible import ReversibleSequence  # beyond module 5
from .models.rotary import Rotary  # beyond module 5
from .models.sequence_classifier import SequenceClassifier  # beyond module 5
from .module import Module, Parameter
from .modules_basic import Dropout, Embedding, LayerNorm1d, Linear  # beyond module 3
from .nn import (  # beyond module 3
    GELU,
    argmax,
    avgpool2d,
    dropout,
    logsoftmax,
    logsumexp,
    max,
    maxpool2d,
    one_hot,
    silu,  # beyond module 5
    softmax,
    softmax_loss,
    tile,
)
from .optim import (  # beyond module 1
    SGD,
    Adam,  # beyond module 3
    Optimizer,
)
from .scalar import Scalar, ScalarHistory, derivative_check  # beyond module 0, until module 1
from .scalar_functions import ScalarFunction  # beyond module 0, until module 1
from .scalars.modes import no_grad  # beyond module 1
from .tensor import Tensor  # beyond module 1
from .tensor_data import (  # beyond module 1
    MAX_DIMS,
    IndexingError,
    Shape,
    Storage,
    Strides,
    TensorData,
    UserIndex,
    UserShape,
    UserStrides,
    broadcast_index,
    get_default_dtype,  # beyond module 5
    index_to_position,
    set_default_dtype,  # beyond module 5
    shape_broadcast,
    strides_from_shape,
    to_index,
)
from .tensor_functions import (  # beyond module 1
    EQ,
    LT,
    Add,
    All,
    Copy,
    Exp,
    Inv,
    IsClose,
    Log,
    MatMul,
    Max,  # beyond module 3
    Mul,
    Neg,
    Permute,
    PowerScalar,  # beyond module 2
    ReLU,
    Sigmoid,
    Sum,
    Tanh,  # beyond module 2
    View,
)
from .tensor_ops import (  # beyond module 1
    MapProto,  # beyond module 5
    SimpleBackend,
    SimpleOps,
    TensorBackend,
    TensorOps,
)
from .tensors.derivatives import grad, hessian, hvp, jvp, vjp  # beyond module 5
from .tensors.dlpack import from_dlpack  # beyond module 5
from .tensors.einsum import einsum  # beyond module 5
from .tensors.factories import (  # beyond module 1
    from_numpy,
    full,
    manual_seed,
    ones,
    ones_tensor_from_numpy,  # beyond module 5
    rand,
    randn,  # beyond module 3
    tensor_from_numpy,  # beyond module 5
    zeros,
    zeros_tensor_from_numpy,  # beyond module 5
)
from .tensors.factories import tensor as _tensor  # beyond module 1
from .tensors.gradient_check import (  # beyond module 1, until module 4
    grad_central_difference,
    grad_check,
)
from .tensors.joining import cat, stack  # beyond module 5
from .tensors.more_factories import (  # beyond module 5
    arange,
    full_like,
    ones_like,
    rand_like,
    randn_like,
    zeros_like,
)
from .testing import MathTest, MathTestVariable  # beyond module 0, until module 3
from .training.adamw import AdamW  # beyond module 5
from .training.anomaly import AnomalyError, detect_anomaly  # beyond module 5
from .training.captured_step import CaptureError, GraphStep, graph_step  # beyond module 5
from .training.clipping import clip_grad_norm_  # beyond module 5
from .training.recompute import checkpoint  # beyond module 5
from .training.schedulers import CosineAnnealingLR, LambdaLR, StepLR  # beyond module 5
from .transformer import (  # beyond module 4
    DecoderLM,
    FeedForward,
    GatedFeedForward,  # beyond module 5
    MultiHeadAttention,
    TransformerLayer,
)

bfloat16 = BFLOAT16.type  # beyond module 1
# The function: else type checkers see the file of that name.  # beyond module 1
tensor = _tensor  # beyond module 1
prod = operators.prod
version = "0.4"  # of the published course's interface
# The version of this package; setup.py and docs/conf.py read it here.
__version__ = "0.2.0"
