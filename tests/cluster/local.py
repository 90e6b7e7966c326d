"""A Ray cluster of two nodes on this machine and the application on it: `python -m tests.cluster.local '{"model": ...}'`.

A program of its own, as Ray reads variables when it is imported and leaves threads behind. It prints where the application
answers and ends, with everything that it started, when its standard input does.
"""

import json
import socket
import sys
import tempfile

import ray
from ray import serve
from ray.cluster_utils import Cluster

from duetts.cluster import app
from duetts.cluster.application import NAME

LOOPBACK = "127.0.0.1"
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": LOOPBACK}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets' paths are short
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "temp_dir": folder})
        try:
            cluster.add_node(**NODE)
            ray.init(address=cluster.address, _node_ip_address=LOOPBACK, log_to_driver=True)
            with socket.create_server((LOOPBACK, 0)) as free:
                port = free.getsockname()[1]
            serve.start(http_options={"host": LOOPBACK, "port": port}, proxy_location="HeadOnly")
            serve.run(app(json.loads(sys.argv[1])), name=NAME, route_prefix="/")
            print(f"http://{LOOPBACK}:{port}", flush=True)
            sys.stdin.read()
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
