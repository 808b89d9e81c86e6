"""A real Spark standalone cluster on loopback: a Master, two Workers and a Connect server.

`python -m tests.cluster` keeps one running until Ctrl-C.
"""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bridge.spark.engines.apache import start_server
from bridge.spark.engines.process import SparkProcess, free_port, spark_environment

HOST = "127.0.0.1"
# A JVM of a minute spends most of it in the second compiler. Without that it would have room for 48 MB of code, and
# compile over and over what it threw away.
SHORT_LIVED = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"


@contextmanager
def standalone_cluster(spark_jars: str | None = None) -> Iterator[str]:
    """Yield the `sc://` remote of a cluster with two executors of one core each."""
    environment = spark_environment() | {
        "SPARK_LOCAL_IP": HOST,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
    }
    spark_class = str(Path(environment["SPARK_HOME"]) / "bin" / "spark-class")

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bridge-cluster-")))

        def start_daemon(name: str, program: str, *arguments: str) -> int:
            scratch = folder / name
            scratch.mkdir()
            port = free_port()
            process = SparkProcess.start(
                [
                    *(spark_class, f"org.apache.spark.deploy.{program}"),
                    *("--host", HOST, "--port", str(port), "--webui-port", "0"),
                    *arguments,
                ],
                name=name,
                environment=environment | {"SPARK_LOCAL_DIRS": str(scratch), "SPARK_WORKER_DIR": str(scratch)},
                log=folder / f"{name}.log",
                scratch=scratch,
            )
            stack.callback(process.stop)
            process.wait_for_port(HOST, port, timeout_s=60)
            return port

        master = f"spark://{HOST}:{start_daemon('master', 'master.Master')}"
        for worker in ("worker-1", "worker-2"):
            start_daemon(worker, "worker.Worker", "--cores", "1", "--memory", "1g", master)

        server = start_server(
            master,
            spark_jars=spark_jars,
            warehouse=folder / "warehouse",
            extra_conf={
                "spark.driver.host": HOST,
                "spark.driver.bindAddress": HOST,
                "spark.driver.memory": "1g",
                "spark.driver.extraJavaOptions": SHORT_LIVED,
                "spark.executor.extraJavaOptions": SHORT_LIVED,
                "spark.executor.memory": "700m",
                "spark.cores.max": "2",
            },
        )
        stack.callback(server.stop)
        yield server.remote


def main() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        with standalone_cluster(os.environ.get("BRIDGE_SPARK_JARS")) as remote:
            print(remote)
            print(f"export SPARK_REMOTE={shlex.quote(remote)}")
            print("Ctrl-C stops the cluster.", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
