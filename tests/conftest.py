"""What every test may use."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices on one machine; a test that wants one uses the first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data; without it the test is skipped.

    Where BERT_JAX_DATA is set the folder must be there: a missing one is a failure.
    """
    given = os.environ.get("BERT_JAX_DATA")
    path = Path(given or ROOT.parent / "shared/data")
    if not path.is_dir():
        if given:
            pytest.fail(f"BERT_JAX_DATA={given} is not a folder")
        pytest.skip("real data: set BERT_JAX_DATA")
    return path
