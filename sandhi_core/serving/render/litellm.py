"""Configuration of LiteLLM's proxy, which puts all members behind one address and routes by the model's name.

Fields as documented for its proxy (docs.litellm.ai, "Proxy: config.yaml"; `hosted_vllm/` and `openai/` are its names of
OpenAI-compatible servers). Checked with LiteLLM 1.108.7.
"""

from collections.abc import Sequence
from typing import Any

from sandhi_core.serving.members import Member
from sandhi_core.serving.render.text import yaml_bytes

_PROVIDERS = {"vllm": "hosted_vllm", "transformers": "openai"}


def proxy_config(members: Sequence[Member], host: str | None = None) -> bytes:
    """`host`: where all servers listen; by default each at a host of its own name, as in compose and Kubernetes."""
    return yaml_bytes(
        {
            "model_list": [
                _model(name, member, host or member.host_name) for member in members for name in member.models
            ],
            # A request is not repeated at another's: every model has one server.
            "router_settings": {"num_retries": 0},
            "litellm_settings": {"telemetry": False, "drop_params": False},
        }
    )


def _model(name: str, member: Member, host: str) -> dict[str, Any]:
    return {
        "model_name": name,
        "litellm_params": {
            "model": f"{_PROVIDERS[member.engine]}/{name}",
            "api_base": f"http://{host}:{member.port}/v1",
            "api_key": "none",  # LiteLLM wants one; the servers ask for none
        },
    }
