"""Packaging. The core's requirements stand in requirements.txt; everything else is an extra."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
LINES = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
README = HERE / "README.md"
# The version stands in minitorch/__init__.py only. A build cannot import it: NumPy may be missing.
_SOURCE = (HERE / "minitorch" / "__init__.py").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', _SOURCE, re.MULTILINE)
PACKAGES = ("minitorch", "kernels")
MATPLOTLIB = "matplotlib>=3.9,<4"
SKLEARN = "scikit-learn>=1.5,<2"

# The second is a wheel with the MPI library, so that no system package is needed.
MPI = ["mpi4py>=4.1,<5; sys_platform != 'win32'", "mpich>=4.3,<6; sys_platform != 'win32'"]

COURSE = ["hypothesis>=6.139,<7", "pytest>=8,<10", "pytest-xdist>=3.5,<4"]

EXTRAS = {
    # CUDA kernels on an NVIDIA GPU. cu13 needs driver 580 or newer; for an older one install
    # "numba-cuda[cu12]==0.30.4" instead. numba-cuda 0.30 has no builds for Python 3.15.
    "cuda": [
        "numba-cuda[cu13]>=0.30.4,<0.31; sys_platform != 'darwin' and python_version < '3.15'"
    ],
    "plot": [MATPLOTLIB],
    # The digits of project/run_digits.py, which come with the library.
    "digits": [SKLEARN],
    "app": [MATPLOTLIB, "streamlit>=1.62,<2"],
    "docs": [
        "docutils>=0.21,<0.22",
        "furo>=2024.8,<2027",
        "ipykernel>=6.29,<8",
        MATPLOTLIB,
        "myst-nb>=1.2,<2",
        "myst-parser>=4,<6",
        "sphinx>=8.1,<9",
    ],
    # The operator of kernels.interop.torch, and attention for Hugging Face's models.
    "torch": ["torch>=2.5,<3", "transformers>=4.57,<6"],
    # Texts for the weights of Hugging Face, in project/generate.py.
    "tokenizers": ["tokenizers>=0.21.4,<1"],
    # The server of project/serve.py.
    "serve": ["fastapi>=0.115,<1", "uvicorn>=0.34,<1"],
    # Groups of processes for minitorch.distributed, and mpiexec, which starts them.
    "mpi": MPI,
    # The same between GPUs, one process each.
    "nccl": ["nccl4py[cu13]>=0.6,<1; sys_platform == 'linux'"],
    # A peer for the benchmarks.  The CPU build is smaller; see pytorch.org for how to choose one.
    "bench": ["torch>=2.4,<3"],
    "dist": ["build>=1,<2", "twine>=5,<7"],
    # What a student needs besides the library.
    "course": COURSE,
    "test": [
        *COURSE,
        # Run the scripts in a notebook (tests/project/test_notebooks.py).
        "ipykernel>=6.29,<8",
        "nbclient>=0.10,<1",
        # Drives the Chromium that is installed; "playwright install chromium" gets one.
        "playwright>=1.40,<2",
        # Builds the wheel that tests/repository/test_packaging.py installs.
        "setuptools>=70.1",
        # Run attention over several ranks (tests/minitorch/distributed).
        *MPI,
        SKLEARN,
    ],
    "lint": ["pyright[nodejs]>=1.1.390,<2", "ruff>=0.9,<0.18"],
}

setup(
    name="minitorch-flash",
    version=VERSION,
    description="Automatic differentiation, tensors and FlashAttention kernels in readable Python",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The minitorch-flash authors",
    license="MIT",
    keywords="attention flash-attention autodiff cuda numba education",
    project_urls={
        "minitorch course": "https://minitorch.github.io",
        "FlashAttention": "https://arxiv.org/abs/2205.14135",
        "FlashAttention-2": "https://arxiv.org/abs/2307.08691",
        "FlashAttention-3": "https://arxiv.org/abs/2407.08608",
    },
    packages=find_packages(include=[name for p in PACKAGES for name in (p, f"{p}.*")]),
    package_data={name: ["py.typed"] for name in PACKAGES},
    zip_safe=False,
    python_requires=">=3.10,<3.16",
    install_requires=[line for line in LINES if line and not line.startswith("#")],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Programming Language :: Python :: 3.15",
        "Topic :: Education",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
