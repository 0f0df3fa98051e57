"""Run kernels on a GPU if there is one, else in Triton's interpreter (chosen in ../conftest.py)."""

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="needs a CUDA device")
    blind = pytest.mark.skip(reason="no GPU, and Triton was imported without TRITON_INTERPRET=1")
    for item in items:
        if item.path.parent.name != "kernels":
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"))
        if "gpu" in item.keywords:
            if not HAS_GPU:
                item.add_marker(missing)
        elif "device" in getattr(item, "fixturenames", ()) and not HAS_GPU and not triton.knobs.runtime.interpret:
            item.add_marker(blind)


@pytest.fixture(scope="session")
def device():
    return "cuda" if HAS_GPU else "cpu"
