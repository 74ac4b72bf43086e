"""A stand-in for vLLM at the boundary of its process: what `sandhi serve` does when a server dies, hangs or lies is
tried with it; that the real one works is tried in test_fleet_vllm.py."""

from pathlib import Path

SERVER = """
import argparse, json, mmap, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
parser = argparse.ArgumentParser()
for name in ("model", "served-model-name", "host", "port", "die-at", "hang", "alias"):
    parser.add_argument("--" + name)
given, _ = parser.parse_known_args()
if given.hang == given.served_model_name: time.sleep(600)
maps = []
for file in sorted(pathlib.Path(given.model).glob("*.safetensors")):
    maps.append(mmap.mmap(os.open(file, os.O_RDONLY), 0, prot=mmap.PROT_READ))
    maps[-1].read()
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        name = given.alias or given.served_model_name
        self.wfile.write(json.dumps({"data": [{"id": name}]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != (given.alias or given.served_model_name): return self.send_error(404, "no such model")
        message = {"role": "assistant", "content": "I am " + given.served_model_name}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                  "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                  "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *arguments): pass
server = HTTPServer((given.host, int(given.port)), Answer)
server.timeout = 0.1
print("serving", given.served_model_name, flush=True)
name, _, sign = (given.die_at or "").partition(":")
while name != given.served_model_name or not os.path.exists(sign): server.handle_request()
sys.exit("out of memory")
"""


def install(folder: Path) -> Path:
    """Put it into `folder`, which is then to be on PYTHONPATH."""
    module = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(SERVER)
    return folder
