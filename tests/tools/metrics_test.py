#!/usr/bin/env python3
"""gpureclaim metrics and serve: the formats by their readers, the values against status --json, and the server.

Usage: metrics_test.py GPURECLAIM SIM_FOLDER SHIM FAKE_NVML SOURCE_FOLDER

Readers are Python's prometheus_client, promtool and Prometheus, where these are installed.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

from scene import MIB, Scene, until

try:
    from prometheus_client import openmetrics, parser
    import prometheus_client.openmetrics.parser
except ImportError:
    openmetrics = None

command, sim, shim, fake, source = sys.argv[1:]
NAME = 'a"b\\c'


def here(tool):
    if shutil.which(tool):
        return True
    print(f"no {tool} here: what needs it is left out", flush=True)
    return False


def page(scene, *flags, **environment):
    code, out, error = scene.run("metrics", *flags, **environment)
    scene.check(code == 0 and error == "", f"metrics: {code} {error}")
    return out


def read_plainly(text):
    """The samples by name: a list of labels and value. A metric stands in one place, and no series is there twice."""
    samples, types, seen = {}, {}, set()
    for line in text.splitlines():
        kind = re.fullmatch(r"# TYPE (\w+) (gauge|counter)", line)
        if kind:
            assert kind[1] not in types, line
            types[kind[1]] = kind[2]
        elif not line.startswith("# "):
            name, _, labels, value = re.fullmatch(r"(\w+)(\{(.*)\})? (\S+)", line).groups()
            assert re.sub("_total$", "", name) == re.sub("_total$", "", list(types)[-1]), line
            series = line.rsplit(" ", 1)[0]
            assert series not in seen, line
            seen.add(series)
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or "")
            samples.setdefault(name, []).append(({key: re.sub(r"\\(.)", r"\1", text) for key, text in pairs},
                                                 float(value)))
    return samples


def of_process(samples, name, pid):
    found = [value for labels, value in samples.get(name, []) if labels.get("pid") == str(pid)]
    return found[0] if found else None


def formats(scene):
    """Both formats are what their readers take, also where a name has quotes and nobody is there."""
    scene.check(page(scene).endswith("\n# EOF\n"), "the end without processes")
    process = scene.start(("bash", "-c", 'exec -a "$0" "$@"', NAME), GPURECLAIM_HARD_LIMIT="512MiB")
    other = scene.start(GPURECLAIM_GROUP="second")
    scene.check(process.ask("alloc", 0, 100) == 0 and other.ask("alloc", 0, 30) == 0, "a process cannot work")
    with open(f"{scene.folder}/nvml", "w", encoding="ascii") as file:
        uuid = json.loads(scene.run("status", "--json")[1])["gpus"][0]["uuid"]
        file.write(f"GPU-00000000-0000-0000-0000-000000000000 1 1\nGPU-{uuid} 1024 400\n")
    with open(f"{scene.folder}/processes", "w", encoding="ascii") as file:
        file.write("4000001 77\n4000001 77\n4000002 -1\n")
    nvml = {"FAKE_NVML": f"{scene.folder}/nvml", "FAKE_NVML_PROCESSES": f"{scene.folder}/processes",
            "LD_LIBRARY_PATH": f"{scene.folder}/lib"}
    gpus = {gpu["group"]: gpu for gpu in json.loads(scene.run("status", "--json", **nvml)[1])["gpus"]}
    text, plain = page(scene, **nvml), page(scene, "--prometheus", **nvml)
    samples = read_plainly(text)
    scene.check(samples.keys() == read_plainly(plain).keys(), "both formats have the same names")
    # The values are those of status.
    scene.check(samples["gpureclaim_gpu_memory_used_bytes"] == [({"uuid": uuid, "gpu": "1"}, 400 * MIB)],
                f"a GPU stands there once: {samples['gpureclaim_gpu_memory_used_bytes']}")
    for group, gpu in gpus.items():
        foreign = [value for labels, value in samples["gpureclaim_group_foreign_bytes"] if labels["group"] == group]
        scene.check(foreign == [gpu["foreign_bytes"]], f"not of group {group}: {foreign}")
        for told in gpu["processes"]:
            for name, value in told.items():
                if name not in ("pid", "name", "same_pid_namespace", "idle_s"):
                    got = of_process(samples, "gpureclaim_process_" + name, told["pid"])
                    scene.check(got == value, f"{name} of {told['pid']}: {got}, not {value}")
    labels, value = samples["gpureclaim_process_hard_limit_bytes"][0]
    scene.check(value == 512 * MIB and labels["command"] == NAME and labels["uuid"] == uuid, f"labels: {labels}")
    scene.check(of_process(samples, "gpureclaim_other_process_used_bytes", 4000001) == 77 * MIB, "another process")
    if openmetrics:
        families = {family.name: family for family in openmetrics.parser.text_string_to_metric_families(text)}
        limit = families["gpureclaim_process_hard_limit_bytes"]
        scene.check(limit.unit == "bytes" and limit.samples[0].labels["command"] == NAME, f"OpenMetrics: {limit}")
        families = {family.name: family for family in parser.text_string_to_metric_families(plain)}
        scene.check(families["gpureclaim_process_given_bytes"].type == "counter", f"Prometheus: {families.keys()}")
    else:
        print("no prometheus_client here (Debian: python3-prometheus-client): its parser is left out", flush=True)
    if here("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=plain, capture_output=True, text=True,
                              check=False)
        scene.check((done.returncode, done.stdout + done.stderr) == (0, ""), f"promtool: {done}")
        done = subprocess.run(["promtool", "check", "rules", f"{source}/tools/prometheus/alerts.yml"],
                              capture_output=True, text=True, check=False)
        scene.check(done.returncode == 0, f"promtool: {done}")
        # Two users have a group of one name: only the one that is near its own limit is told of.
        series = [{"series": f'gpureclaim_process_{name}{{uuid="u", group="default", user="{user}", pid="{pid}"}}',
                   "values": f"{value}+0x20"} for user, pid, live in (("a", 1, 60), ("a", 2, 36), ("b", 3, 60))
                  for name, value in (("live_bytes", live), ("group_limit_bytes", 100))]
        alert = {"exp_labels": {"uuid": "u", "group": "default", "user": "a"},
                 "exp_annotations": {"summary": "Group default of a has 96% of its limit"}}
        rules = os.path.join(scene.folder, "rules.json")
        with open(rules, "w", encoding="utf-8") as file:
            json.dump({"rule_files": [f"{source}/tools/prometheus/alerts.yml"], "evaluation_interval": "1m",
                       "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": [
                           {"eval_time": "15m", "alertname": "GpureclaimNearGroupLimit", "exp_alerts": [alert]}]}]},
                      file)
        done = subprocess.run(["promtool", "test", "rules", rules], capture_output=True, text=True, check=False)
        scene.check(done.returncode == 0, f"promtool: {done}")


def documents(scene):
    """docs/metrics.md has the list, and the examples use no other names."""
    text = page(scene, "--prometheus")
    rows = re.findall(r"# HELP (\w+) (.*)\.\n# TYPE \1 (\w+)\n", text)
    table = "".join(f"| `{name}` | {kind} | {words} |\n" for name, words, kind in rows)
    with open(f"{source}/docs/metrics.md", encoding="utf-8") as file:
        listed = re.search(r"begin -->\n\| metric \| type \| what it is \|\n\|.*\n([^<]*)<", file.read())
    scene.check(listed and listed[1] == table, f"the list in docs/metrics.md is not:\n{table}")
    for name in ("alerts.yml", "grafana.json"):
        with open(f"{source}/tools/prometheus/{name}", encoding="utf-8") as file:
            used = set(re.findall(r"\bgpureclaim_\w+", file.read()))
        scene.check(used and used <= {row[0] for row in rows}, f"{name}: {used - {row[0] for row in rows}}")
    with open(f"{source}/tools/prometheus/grafana.json", encoding="utf-8") as file:
        json.load(file)


def to_file(scene):
    """-o replaces the file, or leaves it."""
    folder = os.path.join(scene.folder, "out")
    os.mkdir(folder)
    path = os.path.join(folder, "x.prom")
    for _ in range(2):
        scene.check(page(scene, "-o", path) == "", "nothing on standard output")
        scene.check("gpureclaim_" in page(scene, "-o", "-") and not os.path.exists("-"), "- is standard output")
        with open(path, encoding="ascii") as file:
            scene.check(file.read() == page(scene), "the file is the page")
        scene.check(os.stat(path).st_mode & 0o444 == 0o444 and os.listdir(folder) == ["x.prom"], "readable, and alone")
    os.symlink("x.prom", os.path.join(folder, "link"))
    for wrong, words in (("link", "not a regular file"), (".", "not a regular file"), ("no/x", "No such file")):
        code, _, error = scene.run("metrics", "-o", os.path.join(folder, wrong))
        scene.check(code == 1 and words in error, f"-o {wrong}: {code} {error}")
    scene.check(sorted(os.listdir(folder)) == ["link", "x.prom"], f"left behind: {os.listdir(folder)}")


def serve(scene):
    """The page over HTTP, and nothing else."""
    process = scene.start()
    process.ask("alloc", 0, 100)
    code, _, error = scene.run("serve", "--listen", "[::1]")
    scene.check(code == 2 and "expected HOST:PORT" in error, f"no port: {code} {error}")
    if not os.path.exists(command + "-serve"):
        code, _, error = scene.run("serve")
        scene.check(code == 1 and "built without libmicrohttpd" in error, f"without it: {code} {error}")
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([command, "serve", "--listen", "127.0.0.1:0"], env=scene.environment,
                              stdout=subprocess.PIPE, text=True) as server:
            address = re.fullmatch(r"Serving http://(.*)/metrics\n", server.stdout.readline())[1]
            try:
                answers(scene, address, process.pid)
            finally:
                server.send_signal(number)
            scene.check(server.wait(30) == 0, f"it ends well: {server.returncode}")


def answers(scene, address, pid):
    def ask(method, path, **headers):
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers["Content-Type"], text

    status, kind, text = ask("GET", "/metrics")
    scene.check((status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8"), f"plain: {status} {kind}")
    scene.check(of_process(read_plainly(text), "gpureclaim_process_live_bytes", pid) == 100 * MIB, f"values: {text}")
    status, kind, text = ask("GET", "/metrics?x=1", Accept="application/openmetrics-text;version=1.0.0,*/*;q=0.1")
    scene.check(status == 200 and kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n"), kind)
    for accept, is_open in (("Application/OpenMetrics-Text", True), ("text/html , application/openmetrics-text", True),
                            ("application/openmetrics-text; q=0.5, text/plain ;q=0.3", True),
                            ("application/openmetrics-text;q=0.3,text/plain;q=0.5", False),
                            ("application/openmetrics-text;q=0.3,text/*;q=0.5", False),
                            ("application/openmetrics-text;q=0.3,text/plain;q=0.2,text/*;q=0.5", True),
                            ("application/openmetrics-text;q=0.3,text/*;q=0.2,*/*", True),
                            ("application/openmetrics-text;q=0.3,text/html,*/*;q=0.5", False),
                            ("*/*", False), ("application/*", False),
                            ("application/openmetrics-text;q=0", False), ("application/openmetrics-texts", False),
                            ("text/plain;x=application/openmetrics-text", False), ("", False)):
        kind = ask("GET", "/metrics", Accept=accept)[1]
        scene.check(kind.startswith("application/openmetrics-text") == is_open, f"Accept: {accept}: {kind}")
    scene.check(ask("HEAD", "/metrics")[::2] == (200, ""), "HEAD")
    for method, path, status in (("GET", "/", 404), ("GET", "/metrics/", 404), ("POST", "/metrics", 405),
                                 ("DELETE", "/metrics", 405), ("PUT", "/x", 404)):
        scene.check(ask(method, path)[0] == status, f"{method} {path}")
    code, _, error = scene.run("serve", "--listen", address)
    scene.check(code == 1 and f"{address}: Address already in use" in error, f"in use: {code} {error}")
    host, port = address.split(":")

    def answered():
        try:
            return ask("GET", "/metrics")[0] == 200
        except OSError:
            return False

    # Readers that send a byte now and then are never silent; others are answered all the same.
    slow = [socket.create_connection((host, int(port))) for _ in range(8)]
    for one in slow:
        one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    for _ in range(3):
        for one in slow:
            try:
                one.sendall(b"x")
            except OSError:
                pass
        scene.check(until(answered, 5), "answers beside slow readers")
    for one in slow:
        one.close()
    # More connections than it takes wait or are closed; it goes on.
    idle = [socket.create_connection((host, int(port))) for _ in range(20)]
    for one in idle:
        one.close()
    scene.check(until(answered), "after idle connections")
    if here("prometheus"):
        scrape(scene, address)


def scrape(scene, address):
    """Prometheus itself takes the page."""
    with open(f"{scene.folder}/prometheus.yml", "w", encoding="ascii") as file:
        file.write("global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: gpureclaim\n"
                   f"    static_configs: [{{targets: ['{address}']}}]\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{free.getsockname()[1]}"
    with subprocess.Popen(["prometheus", f"--config.file={scene.folder}/prometheus.yml", "--log.level=error",
                           f"--storage.tsdb.path={scene.folder}/tsdb", f"--web.listen-address={own}"]) as reader:
        def seen():
            try:
                connection = http.client.HTTPConnection(own, timeout=10)
                connection.request("GET", "/api/v1/query?query=up%20and%20on()%20gpureclaim_process_live_bytes")
                result = json.loads(connection.getresponse().read())["data"]["result"]
                return bool(result) and result[0]["value"][1] == "1"
            except (OSError, ValueError):  # it is not ready yet
                return False

        try:
            scene.check(until(seen, 30), "Prometheus reads it")
        finally:
            reader.kill()


failed = 0
for test in (formats, documents, to_file, serve):
    with Scene(command, sim, shim) as scene:
        os.mkdir(os.path.join(scene.folder, "lib"))
        shutil.copy(fake, os.path.join(scene.folder, "lib", "libnvidia-ml.so.1"))
        test(scene)
        failed += scene.failed
raise SystemExit(1 if failed else 0)
