# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve`: `python stub_server.py MODEL --port P …`; MODEL says how it behaves.

Models: ok | dies | sick (never healthy) | stubborn (ignores SIGTERM) | parent (leaves a grandchild, printed in the log)
"""

import http.server
import os
import signal
import subprocess
import sys

model, arguments = sys.argv[1], sys.argv[2:]
port = int(arguments[arguments.index("--port") + 1])
print(f"arguments: {arguments}")
print(f"cores: {os.environ.get('VLLM_CPU_OMP_THREADS_BIND')} role: {os.environ.get('VLLM_PD_ROLE')}", flush=True)

if model == "dies" or (model == "decode-dies" and "decode" in arguments):
    for number in range(40):
        print(f"line {number}")
    print("ValueError: the reason", flush=True)
    sys.exit(3)
if model == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if model == "parent":
    child = subprocess.Popen(["sleep", "600"])
    print(f"grandchild {child.pid}", flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if model == "sick" else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
