"""Define the settings of a server, as the options of `draftproof serve` give them."""

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a server.

    name             the model's name in requests and answers
    api_keys         keys of which a request must give one; empty: none is asked for
    cors_origins     origins whose pages may call the server; "*" for all
    max_queue        requests that may wait for a place; more get 429
    max_prompt       tokens of the longest prompt; None: what the model has room for
    request_timeout  seconds after which a request is ended with an error; None: never
    max_round        seconds after which a round counts as hanging, and /health says so; None: never
    max_body         bytes of the largest body; more gets 413
    chat_template    a template in place of the tokenizer's own; None: the tokenizer's
    metrics_prefix   the word before the colon in the names of metrics
    """

    name: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_prompt: int | None = None
    request_timeout: float | None = None
    max_round: float | None = 120.0
    max_body: int = 4 * MEBIBYTE
    chat_template: str | None = None
    metrics_prefix: str = "draftproof"
