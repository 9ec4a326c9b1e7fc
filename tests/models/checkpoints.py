"""Tiny checkpoints on disk, and a stand-in for the Hub."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.modeling import GatedQwen3ForCausalLM

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GATES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "gate_headwise": {"headwise_attn_output_gate": True},
    "gate_elementwise": {"elementwise_attn_output_gate": True},
}


def byte_tokenizer(bos: str | None = "<bos>") -> PreTrainedTokenizerFast:
    """A token a byte, and perhaps a BOS, which the tokenizer does not add by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos)


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def gated_model(variant: str = "gate_headwise", **options: Any) -> GatedQwen3ForCausalLM:
    torch.manual_seed(0)
    model = GatedQwen3ForCausalLM(GatedQwen3Config(**(SIZES | GATES[variant] | options)))
    return model.to(torch.bfloat16).eval()


def edit_config(directory: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in remove}))


def save_as_official(model: GatedQwen3ForCausalLM, directory: Path, marker: Path) -> Path:
    """As the paper's: old keys, no head_dim, a qwen2 that points to code (which writes `marker` if it runs)."""
    directory.mkdir(parents=True)
    config = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config |= {
        "architectures": ["Qwen3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_qwen3.Qwen3Config",
            "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
        },
        "model_type": "qwen2",
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
        "tie_word_embeddings": model.config.tie_word_embeddings,
        "qkv_bias": model.config.qkv_bias,
        "use_qk_norm": model.config.use_qk_norm,
        "headwise_attn_output_gate": model.config.headwise_attn_output_gate,
        "elementwise_attn_output_gate": model.config.elementwise_attn_output_gate,
    }
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("configuration_qwen3.py", "modeling_qwen3.py"):
        (directory / name).write_text(
            f"open({str(marker)!r}, 'w').close()\nraise RuntimeError('remote code ran')\n"
        )
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    torch.save(state, directory / "pytorch_model.bin")
    byte_tokenizer(bos=None).save_pretrained(directory)
    return directory


def hub_cache(root: Path, repo: str) -> Path:
    """An empty entry for a repository in a Hub cache; the directory of its one snapshot."""
    entry = root / f"models--{repo.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    snapshot = entry / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


# What the Hub answers for repositories that it does not give.
REFUSED: dict[str, tuple[int, dict[str, str]]] = {
    "org/refused": (403, {}),
    "org/gated": (403, {"X-Error-Code": "GatedRepo"}),
    "org/private": (404, {"X-Error-Code": "RepoNotFound"}),
    "org/bad-token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "org/disabled": (403, {"X-Error-Message": "Access to this resource is disabled."}),
    "org/busy": (429, {}),
    "org/ill": (503, {}),
}


class FakeHub:
    """Serves the repositories under `root` (`root/org/name/...`) as the Hub does; a few it refuses.

    The weights of `org/cut` break off half-way, each time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tokens: set[str | None] = set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        if repo in REFUSED:
            return *REFUSED[repo], b""
        if not (self.root / repo).is_dir():
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api:
            body = json.dumps([] if "tree" in rest else {"id": repo, "sha": COMMIT, "siblings": []}).encode()
            return 200, {"Content-Type": "application/json"}, body
        file = self.root / repo / "/".join(rest[2:])
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        body = file.read_bytes()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(body):x}"', "Accept-Ranges": "bytes"}, body

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.tokens.add(self.headers.get("Authorization"))
                if "org/down" in self.path:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers, body = hub.answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    cut = "org/cut" in self.path and "safetensors" in self.path
                    self.wfile.write(body[: len(body) // 2] if cut else body)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
