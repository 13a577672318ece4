"""A web server that answers with a configured greeting and the node that it runs on."""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CONFIG = json.loads(Path(os.environ["RCFARM_CONFIG"]).read_text())


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{CONFIG['greeting']} from {os.environ['RCFARM_POD_ID']} on {os.environ['RCFARM_NODE']}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    address = os.environ["RCFARM_ADDRESS"], int(os.environ["RCFARM_PORT_HTTP"])
    ThreadingHTTPServer(address, Hello).serve_forever()
