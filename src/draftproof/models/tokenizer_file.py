"""A tokenizer read from its folder by the `tokenizers` library, without importing transformers.

It encodes, decodes and renders plain chats. Everything else is done by transformers' tokenizer of the same folder,
which is loaded then.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class FileTokenizer:
    """The tokenizer of a folder with tokenizer.json, tokenizer_config.json and chat_template.jinja.

    The chat template must need nothing but the messages and the names of special tokens. Another one may be assigned to
    `chat_template`; transformers renders it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._special = {name: value for name, value in settings.items() if name.endswith("_token")}
        self._own_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self.chat_template: Any = self._own_template

    @property
    def eos_token_id(self) -> int | None:
        return self.backend_tokenizer.token_to_id(self._special["eos_token"])

    @property
    def added_tokens_decoder(self) -> Any:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, *, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of tokens."""
        if clean_up_tokenization_spaces:
            return str(self.as_transformers().decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces=True))
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Return the tokens of a chat; arguments as in transformers."""
        unusual = continue_final_message or return_dict or any(value is not None for value in options.values())
        if unusual or self.chat_template != self._own_template:
            return self.as_transformers().apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                return_dict=return_dict,
                **options,
            )
        text = self._template.render(messages=conversation, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self._own_template, globals=dict(self._special))

    def as_transformers(self) -> Any:
        """Return transformers' tokenizer of the same folder, with this one's chat template."""
        self._transformers.chat_template = self.chat_template
        return self._transformers

    @cached_property
    def _transformers(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.as_transformers(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.as_transformers()(*args, **options)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))
