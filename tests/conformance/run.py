import argparse, collections, csv, os, signal, sys, time, unittest, io, traceback, tempfile
from concurrent.futures import ThreadPoolExecutor
from tests.conformance import suite


def start(case, test, path):
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 3
    try:
        result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(case(test))
        code = 0 if result.wasSuccessful() else 1
        if result.skipped:
            code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("patterns", nargs="*")
    p.add_argument("--list", default="../shared/conformance/torch_rpc_tests.csv")
    p.add_argument("-j", type=int, default=3)
    p.add_argument("--limit", type=float, default=60)
    p.add_argument("--logs", default="/tmp/conf")
    p.add_argument("--all", action="store_true")
    a = p.parse_args()
    os.makedirs(a.logs, exist_ok=True)
    rows = [
        r
        for r in csv.DictReader(open(a.list))
        if r["suite"] != "cuda" and r["result_on_torch_2.13_cpu"] == "pass"
    ]
    if not a.all:
        rows = [r for r in rows if r["category"].startswith(("portable", "pins", "TorchScript fn"))]
    if a.patterns:
        rows = [
            r
            for r in rows
            if any(q in f"{r['suite']}.{r['class']}.{r['test']}" for q in a.patterns)
        ]
    classes = suite.load()
    tally = collections.Counter()
    begin = time.monotonic()
    todo = rows[::-1]
    running = {}
    while todo or running:
        while todo and len(running) < a.j:
            r = todo.pop()
            path = os.path.join(a.logs, f"{r['suite']}{r['class']}.{r['test']}.log")
            running[start(classes[f"{r['suite']}.{r['class']}"], r["test"], path)] = (
                r,
                time.monotonic(),
            )
        time.sleep(0.01)
        for pid, (r, t) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > t + a.limit:
                code = "timeout"
            else:
                continue
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not done:
                os.waitpid(pid, 0)
            res = {0: "pass", 1: "FAIL", 2: "skip", "timeout": "TIMEOUT"}.get(code, f"code {code}")
            del running[pid]
            print(
                f"{res:8} {time.monotonic() - t:5.1f} {r['suite']}.{r['class']}.{r['test']} [{r['category'][:12]}]",
                flush=True,
            )
            tally[r["category"], res] += 1
    for k, v in sorted(tally.items()):
        print(v, *k)
    print(f"{time.monotonic() - begin:.0f} s")


main()
