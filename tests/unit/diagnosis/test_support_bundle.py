"""``tfd why``, ``tfd doctor`` and ``tfd support``, and the absence of secrets in their output."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.cluster import control_socket
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.diagnosis import code_reference, redaction
from tfd_notebook.launchers import Fake
from tfd_notebook.model.spec import TaskState
from tfd_notebook.net import control_calls, runtime_dir
from tfd_notebook.ui import magics
from tfd_notebook.ui.cli import main

ROOT = Path(__file__).parents[3]
SECRETS = (
    "s3cr3t-of-the-environment",
    "s3cr3t-of-the-cluster",
    "s3cr3t-of-the-address",
    "s3cr3t-of-the-profile",
    "s3cr3t-of-the-log",
    "s3cr3t-of-the-proxy",
    "s3cr3t-of-the-agent",
    "czNjcjN0LW9mLXRoZS1rZXk",
)


@pytest.fixture(autouse=True)
def _own_place(
    plain_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    yield
    for cluster in clusters().values():
        cluster.stop()
    control_socket.stop()


def run(capsys: Any, *arguments: str) -> tuple[int, str]:
    status = main(arguments)
    return status, capsys.readouterr().out


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


def test_why_explains_findings_and_errors(capsys: Any) -> None:
    status, output = run(capsys, "why", "TFD811")
    assert status == 0
    assert output.startswith("TFD811 dispatcher without workers (error)\n")
    assert "cluster.scale(data_workers=2)" in output
    assert run(capsys, "why", "811") == (status, output)
    _, output = run(capsys, "why", "[TFD301]")
    assert output.startswith("TFD301 NoWorkers (error, a DataError)\n")
    assert run(capsys, "why", "NoWorkers")[1] == output
    assert main(["why", "TFD81"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_why_explains_every_error() -> None:
    for name in errors.__all__:
        code = getattr(errors, name).code
        text = code_reference.why(name)
        assert text.startswith(f"{code} {name} (error")
        assert "](" not in text


@pytest.mark.slow
def test_why_works_from_a_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "SKIP_JUPYTER_BUILDER": "1"}
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extractall(tmp_path / "installed")
    ask = [sys.executable, "-m", "tfd_notebook", "why", "TFD811"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    completed = subprocess.run(
        ask, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert completed.stdout.startswith("TFD811 dispatcher without workers (error)")
    assert (tmp_path / "installed/tfd_notebook/diagnosis/pages/errors.md").is_file()
    # The notebooks of `tfd lab`.
    assert (tmp_path / "installed/tfd_notebook/tutorials/01_quickstart.ipynb").is_file()


def test_doctor_in_a_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, "doctor") == (0, "no findings\nchecked: this host\n")
    assert run(capsys, "doctor", "--json") == (0, "[]\n")
    launcher = Fake()
    tfd.Cluster(data_workers=1, launcher=launcher, name="images")
    launcher.task_hosts[0].set_state("data_worker:0", TaskState.FAILED, "it fell")
    status, output = run(capsys, "doctor", "images", "--json")
    findings = {finding["code"]: finding for finding in json.loads(output)}
    assert status == 1
    assert findings["TFD854"]["what"] == "data_worker:0 is failed: it fell"
    status, output = run(capsys, "doctor", "localhost:1")
    assert status == 1
    assert "TFD809" in output
    assert main(["doctor", "imagse"]) == 2


_OTHER = """
import sys
import tfd_notebook as tfd
from tfd_notebook.launchers import Fake
from tfd_notebook.model.spec import TaskState
launcher = Fake()
tfd.Cluster(data_workers=1, launcher=launcher, name="sibling", env={"API_TOKEN": sys.argv[1]})
launcher.task_hosts[0].set_state("data_worker:0", TaskState.HUNG, "it is silent")
print("up", flush=True)
input()
"""


@pytest.mark.slow
def test_doctor_and_support_query_other_processes(capsys: Any, tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER, SECRETS[1]], stdin=pipe, stdout=pipe, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        until(lambda: process.pid in control_calls.processes())
        status, output = run(capsys, "doctor")
        assert status == 1
        assert "data_worker:0 is hung: it is silent" in " ".join(output.split())
        assert f"process {process.pid}" in output
        status, output = run(capsys, "support", "ticket.tar.gz")
        assert status == 0
        texts = read(tmp_path / "ticket.tar.gz")
        assert "hung" in texts[f"process-{process.pid}/sibling/state.txt"]
        assert SECRETS[1] not in "".join(texts.values())
    finally:
        process.communicate("\n", timeout=60)


def test_archive_has_no_secrets(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, cluster, address, profile, log, proxy, agent, key = SECRETS
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", environment)
    monkeypatch.setenv("no_grpc_proxy", "localhost,127.0.0.1,::1")
    monkeypatch.setenv("http_proxy", f"http://ada:{proxy}@proxy:3128")
    monkeypatch.setenv("TF_VISIBLE", "of use")
    monkeypatch.setenv("PRIVATE_DIARY", "not asked for")
    (tmp_path / "config" / "tfd_notebook").mkdir(parents=True)
    (tmp_path / "config" / "tfd_notebook" / "there.toml").write_text(
        f'launcher = "jupyter"\nurl = "https://one:8888/?token={address}"\ntoken = "{profile}"\n'
    )
    directory, lock = runtime_dir.new_agent_dir("0123456789ab")
    lock.close()
    runtime_dir.write_state(directory, {"token": agent, "owner_pid": 1})
    pem = f"-----BEGIN EC PRIVATE KEY-----\n{key}\n-----END EC PRIVATE KEY-----"
    launcher = Fake()
    running = tfd.Cluster(
        data_workers=1,
        launcher=launcher,
        name="images",
        env={"MY_PASSWORD": cluster, "DATABASE": "postgres hunter2"},
    )
    reason = f"{environment} {cluster} Authorization: Bearer {log} {pem} password='{log}'"
    launcher.task_hosts[0].set_state("data_worker:0", TaskState.FAILED, reason)
    assert environment in running.snapshot().tasks[1].reason
    status, output = run(capsys, "support")
    (path,) = tmp_path.glob("tfd-support-*.tar.gz")
    assert status == 0
    assert path.name in output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    texts = read(path)
    whole = "\n".join(texts.values())
    for secret in SECRETS:
        assert secret not in whole
    assert "not asked for" not in whole
    assert "hunter2" not in whole
    environment_of_tasks = json.loads(texts["here/images/configuration.json"])["env"]
    assert environment_of_tasks == dict.fromkeys(("MY_PASSWORD", "DATABASE"), redaction.REMOVED)
    # The useful parts are kept.
    assert json.loads(texts["here/environment.json"])["TF_VISIBLE"] == "of use"
    assert json.loads(texts["here/environment.json"])["AWS_SECRET_ACCESS_KEY"] == redaction.REMOVED
    assert json.loads(texts["here/versions.json"])["tfd_notebook"] == tfd.__version__
    assert {finding["code"] for finding in json.loads(texts["here/findings.json"])} >= {"TFD854"}
    assert json.loads(texts["here/images/state.json"])["name"] == "images"
    assert "has no output" in texts["here/images/logs/data_worker-0.txt"]
    assert 'launcher = "jupyter"' in texts["profiles/there.toml"]
    assert json.loads(texts["agents/agent-0123456789ab/state.json"])["owner_pid"] == 1


def test_archive_is_never_overwritten(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["support", "mine.txt"]) == 2
    assert "writing" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert main(["support", "nowhere/mine.tar.gz"]) == 2


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://ada:hunter2@one/x", "https://[removed]@one/x"),
        ("GET /?token=abc123&x=1", "GET /?token=[removed]&x=1"),
        ("Authorization: token abcdef123456", "Authorization: [removed]"),
        ('{"api_key": "abc"}', '{"api_key": "[removed]"}'),
        ("https://s3cretToken@github.com/x", "https://[removed]@github.com/x"),
        ("git clone https://x-access:ghs_1@one", "git clone https://[removed]@one"),
        (f"pushed by ghp_{'aB3' * 12}.", "pushed by [removed]."),
        (f"with github_pat_{'aB3_' * 12} it works", "with [removed] it works"),
        (
            f"got {'.'.join(('eyJhbGciOiJIUzI1NiJ9', 'eyJzdWIiOiIxMjM0In0', 'c2ln-_'))}!",
            "got [removed]!",
        ),
        ("id AKIAIOSFODNN7EXAMPLE used", "id [removed] used"),
        ("id ASIAIOSFODNN7EXAMPLE used", "id [removed] used"),
        (
            "mail ada@example.com about https://one/x@y",
            "mail ada@example.com about https://one/x@y",
        ),
        ("AKIAs and ghp_ are prefixes", "AKIAs and ghp_ are prefixes"),
        ("the tokens of a function, a secret", "the tokens of a function, a secret"),
        ("worker:0 at localhost:5050", "worker:0 at localhost:5050"),
    ],
)
def test_possible_secrets_are_redacted(text: str, kept: str) -> None:
    assert redaction.Redactor({}).text(text) == kept


#: Random text, from which tests compose tokens. Complete ones would alarm scanners.
RANDOM = "q7Tz0WbR4kXm9PvL2sYd8HnJ5cGf1AeU6oKiV3xB" * 3
HEX = "3f9ac04b7e1d5826" * 4


@pytest.mark.parametrize(
    "token",
    [
        f"hf_{'wPqLzRbTnXmKdVsYhJcGfAeUoKiVxBaQrT'}",
        f"api_org_{'wPqLzRbTnXmKdVsYhJcGfAeUoKiVxBaQrT'}",
        f"sk-{RANDOM[:48]}",
        f"sk-{HEX[:32]}",
        f"sk-proj-{RANDOM[:30]}_{RANDOM[:20]}-{RANDOM[:18]}_{RANDOM[:40]}",
        f"sk-ant-api03-{RANDOM[:10]}-{RANDOM[:15]}_{RANDOM[:19]}-{RANDOM[:19]}_AA",
        f"xoxb-{'174562938471'}-{'9182736450918'}-{RANDOM[:24]}",
        f"xoxe.xoxp-1-{RANDOM[:60]}",
        f"xapp-1-A0{'4KX7Q2M9'}-{'5182736450918'}-{HEX}",
        f"glpat-{RANDOM[:20]}",
        f"glpat-{RANDOM[:27]}.01.{RANDOM[:9]}",
        f"gldt-{RANDOM[:20]}",
        f"glcbt-64_{RANDOM[:20]}",
        f"sk_live_{RANDOM[:24]}",
        f"rk_test_{RANDOM[:24]}",
        f"npm_{RANDOM[:36]}",
        f"pypi-AgEIcHlwaS5vcmc{RANDOM[:60]}",
        f"AIza{'Sy'}{RANDOM[:33]}",
        f"ya29.{'a0Af'}_{RANDOM[:60]}",
        f"GOCSPX-{RANDOM[:28]}",
        f"SG.{RANDOM[:22]}.{RANDOM[:43]}",
        f"dapi{HEX[:32]}",
        f"dckr_pat_{RANDOM[:27]}",
        f"hvs.{'CAES'}{RANDOM[:90]}",
        f"nvapi-{RANDOM[:64]}",
    ],
)
@pytest.mark.parametrize("around", ["with {} it fails", "'{}'", "line\\n{}\\nline", "({})", "a={}"])
def test_tokens_with_a_known_prefix_are_removed(token: str, around: str) -> None:
    assert redaction.Redactor({}).text(around.format(token)) == around.format("[removed]")


BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
LAST = "MzEfYyjiWA4R4/M2bS1GB4t7"
BEGIN, END = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"


@pytest.mark.parametrize("kind", ["PRIVATE KEY", "RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK"])
@pytest.mark.parametrize("cut", ["{begin}{body}{end}", "{begin}{body}", "{body}{end}"])
def test_private_keys_are_removed(kind: str, cut: str) -> None:
    begin, end = (mark.replace("PRIVATE KEY", kind) for mark in (BEGIN, END))
    for line_break in ("\n", "\r\n", "\\n", "\\r\\n"):
        body = line_break.join((BODY, BODY, LAST, ""))
        key = cut.format(begin=begin + line_break, body=body, end=end)
        for around in (key, f'{{"private_key": "{key}"}}', f"key='{key}'"):
            text = redaction.Redactor({}).text(f"before it\n{around}")
            assert BODY not in text
            assert LAST not in text
            assert text.startswith("before")


def test_lines_of_keys_are_removed_from_logs() -> None:
    redactor = redaction.Redactor({})
    assert BODY not in redactor.text(f"[worker:0] {BODY}\n[worker:0] {BODY}")
    lines = redactor.value(("start", BEGIN, BODY, LAST, END, "step 1"))
    assert "\n".join(lines) == "start\n[removed]\nstep 1"
    assert redactor.value([BODY, LAST, END, "step 1"]) == ["[removed]", "step 1"]


@pytest.mark.parametrize(
    "command",
    [
        "sshpass -p XYZ987 ssh one",
        "docker login -u ada -p XYZ987",
        "redis-cli -a XYZ987",
        "mysql -pXYZ987 -u ada",
        "curl -u ada:XYZ987 one",
        "aws configure set aws_secret_access_key XYZ987",
        "setx API_TOKEN XYZ987",
        "smbclient -U ada%XYZ987",
        "--password XYZ987",
        "train.py --token=XYZ987 --epochs 3",
    ],
)
def test_arguments_of_a_command_are_examined_together(command: str) -> None:
    arguments = command.split()
    cleaned = redaction.Redactor({}).value(arguments)
    for before, after in zip(arguments, cleaned, strict=True):
        assert "XYZ987" not in after
        assert after == before or "XYZ987" in before
    kept = ["redis-cli", "-a", "redis", "", "train.py", "--epochs", "3", "a b"]
    assert redaction.Redactor({}).value(kept) == [*kept[:2], "[removed]", *kept[3:]]


@pytest.mark.parametrize(
    "text",
    [
        'password="SECRET and ANOTHER SECRET"',
        "password = 'SECRET \\'and\\' ANOTHER SECRET'",
        'password = """\nSECRET ANOTHER\n"""',
        '{"password": "SECRET ANOTHER"}',
        r'"{\"password\": \"SECRET ANOTHER\"}"',
        'password="SECRET and ANOTHER SECRET',
        "password=SECRET,ANOTHER",
        "password=SECRET)ANOTHER}SECRET]ANOTHER",
        "password=SECRET'ANOTHER",
        "password: SECRET",
        "'password' => 'SECRET'",
        "Server=db;Uid=ada;Pwd=SECRET;Timeout=3",
        "DB_PWD=/SECRET",
        "DB_PASS: SECRET",
        "DB_PASS=SECRET",
        "export DB_PASS='SECRET ANOTHER'",
        "DB_PASS: 1SECRET",
        "db_pass = 'SECRET'",
        "db_pw: SECRET",
        "dbPass: SECRET",
        "pass=SECRET",
        "user=ada pass=SECRET",
        "pass = 'SECRET ANOTHER'",
        "'pass': 'SECRET ANOTHER'",
        r'"{\"pass\": \"SECRET ANOTHER\"}"',
        "https://one/c?user=ada&pass=SECRET",
        "mount.cifs //one/c /mnt -o user=ada,pass=SECRET",
        "one --pass SECRET --db-pass ANOTHER",
        "['one', '--db-pass', 'SECRET']",
        "openssl rsa -passin pass:SECRET -in one",
        "sshpass -p SECRET ssh one",
        "curl -u ada:SECRET https://one",
        "curl -s -u 'ada:SECRET ANOTHER' https://one",
        "curl -fsSuada:SECRET https://one",
        "curl --user ada:SECRET https://one",
        "curl --user=ada:SECRET -U ada:ANOTHER https://one",
        "curl --proxy-user ada:SECRET --user ada:ANOTHER https://one",
        "['curl', '-u', 'ada:SECRET', 'https://one']",
        '["curl", "--user", "ada:SECRET ANOTHER"]',
        "mysql --password SECRET -h db",
        "mysql -h db -pSECRET one",
        "mysqldump -u ada '-pSECRET' one",
        "machine db login ada password SECRET",
        "machine db\n  login ada\n  password SECRET",
        "<password>SECRET</password> <db:password encrypted='no'>ANOTHER</db:password>",
        "mysql --db-password 'SECRET ANOTHER' -h db",
        "mysql --password=SECRET -h db",
        "['mysql', '--password', 'SECRET', '-h', 'db']",
        '["mysql", "--api-key", "SECRET ANOTHER"]',
        "https://one.blob.core.windows.net/c?sv=1&sig=SECRET%3D&se=2",
        "https://one/c?sig=SECRET%3D",
        "https://one/c?key=SECRET",
        "AccountName=one;AccountKey=SECRET/ANOTHER==;EndpointSuffix=core.windows.net",
        "x-api-key: SECRET",
        "curl -H 'x-api-key: SECRET' https://one",
        "{'x-api-key': 'SECRET'}",
        "Ocp-Apim-Subscription-Key: SECRET",
        "Cookie: one=SECRET; two=ANOTHER",
        "Set-Cookie: one=SECRET; Path=/; two=ANOTHER",
        "curl -H 'Cookie: one=SECRET; two=ANOTHER' https://one",
        '{"Cookie": "one=SECRET; two=ANOTHER"}',
        'Authorization: Digest username="SECRET", response="ANOTHER"',
        "auth=('ada', 'SECRET')",
        'get(url, auth=("ada", "SECRET)ANOTHER"), timeout=3)',
        "auth = HTTPBasicAuth(\n    'ada',\n    'SECRET'\n)",
        'auth=aiohttp.BasicAuth(user, "SECRET")',
        "proxy_auth=(b'ada', b'SECRET')",
        "credentials=('ada', 'SECRET')",
        '{"auth": ["ada", "SECRET"]}',
        "{'auth': ('ada', 'SECRET')}",
        r'"{\"auth\": [\"ada\", \"SECRET\"]}"',
        '{"auths": {"one": {"auth": "YWRhOlNFQ1JFVSECRET=="}}}',
        "//one/:_auth=SECRET",
        "server.login('ada', 'SECRET')",
        "keyring.set_password('one', 'ada', 'SECRET')",
        "os.environ['API_PASSWORD'] = 'SECRET ANOTHER'",
        'config["db"]["password"]="SECRET"',
        "config['password'] = SECRET",
        "os.environ.setdefault('API_PASSWORD', 'SECRET')",
        "os.putenv('API_PASSWORD', 'SECRET')",
        "os.getenv('API_PASSWORD', 'SECRET ANOTHER')",
        'monkeypatch.setenv("API_TOKEN", "SECRET")',
        "setattr(config, 'password', 'SECRET')",
        '[Environment]::SetEnvironmentVariable("API_TOKEN", "SECRET", "User")',
        "[('API_TOKEN', 'SECRET'), ('password', 'ANOTHER')]",
        'headers.append(("X-API-Key", "SECRET"))',
        '{"name": "API_TOKEN", "value": "SECRET ANOTHER"}',
        '[{"key":"password","value":"SECRET"}]',
        "- name: DB_PASS\n  value: SECRET",
        "CREATE USER ada IDENTIFIED BY 'SECRET ANOTHER'",
        "create user 'ada'@'%' identified by 'SECRET'",
        "ALTER USER 'ada'@'h' IDENTIFIED WITH mysql_native_password BY 'SECRET'",
        "ALTER USER ada IDENTIFIED BY SECRET;",
        "alter role ada with encrypted password 'SECRET ANOTHER'",
        "SET PASSWORD FOR 'ada' = 'SECRET'",
        "SET PASSWORD FOR 'ada'@'h' = PASSWORD('SECRET')",
        "aws_secret_access_key = SECRET",
        "aws configure set aws_secret_access_key SECRET",
        'setx API_TOKEN "SECRET ANOTHER" /M',
        "setenv API_TOKEN SECRET",
        "set -gx API_TOKEN SECRET",
        "$env:API_TOKEN = 'SECRET'",
        "export X_TOKEN=SECRET",
        "%env API_TOKEN SECRET",
        "FROM one\nENV DB_PASS SECRET",
        "docker login -u ada -p SECRET one",
        "['podman', 'login', '-p', 'SECRET']",
        "echo 'SECRET' | docker login --password-stdin one",
        "echo SECRET | sudo -S true",
        "['sshpass', '-p', 'SECRET', 'ssh', 'one']",
        "sshpass -pSECRET ssh one",
        "mysql -pSECRET",
        "redis-cli -h one -a SECRET",
        "['redis-cli', '-a', 'SECRET']",
        "mongosh -u ada -p SECRET",
        "ldapsearch -D cn=ada -w SECRET",
        "unzip -P SECRET one.zip",
        "7z x -pSECRET one.7z",
        "smbclient //one/c -U ada%SECRET",
        "kubectl create secret generic one --from-literal=a=SECRET",
        "machine db password SECRET",
        "Authorization: ApiKey SECRET",
        "authorization: SECRET",
        "Authorization: AWS4-HMAC-SHA256 Credential=SECRET/2026, Signature=ANOTHER",
        "curl -H 'Authorization: Custom SECRET ANOTHER' https://one",
        'curl -H "Proxy-Authorization: SECRET" https://one',
        "{'Authorization': 'SECRET'}",
        '{"headers": {"Authorization": "Negotiate SECRET ANOTHER"}}',
        r'"{\"Authorization\": \"ApiKey SECRET\"}"',
        "[('Authorization', 'ApiKey SECRET')]",
        "env=environ({'DATABASE': 'SECRET)ANOTHER', 'B': 'SECRET'})",
        "Popen(['x'], env=mappingproxy({'DATABASE': 'SECRET', 'B': 'ANOTHER'}), bufsize=-1)",
        "env=OrderedDict([('DATABASE', 'SECRET'), ('B', 'ANOTHER')])",
        "env = collections.OrderedDict({'DATABASE': 'SECRET'})",
        "env=dict(os.environ.copy(), DATABASE='SECRET')",
        "env=os.environ | {'DATABASE': 'SECRET'}",
        "docker run --env=DATABASE=SECRET -e B=ANOTHER one",
        "docker run --env DATABASE='SECRET ANOTHER' one",
        "docker run -e 'DATABASE=SECRET ANOTHER' --env=\"B=SECRET\" one",
        "['docker', 'run', '-e', 'DATABASE=SECRET', '--env', 'B=ANOTHER', 'one']",
        '[Service]\nEnvironment="DATABASE=SECRET ANOTHER" "B=SECRET"',
        "Environment=DATABASE=SECRET B=ANOTHER",
        "Cluster(env={'DATABASE': 'SECRET ANOTHER'})",
        'environment = { DATABASE = "SECRET", B = "ANOTHER" }',
        '[environment]\nDATABASE = "SECRET[ANOTHER"\n[other]\n',
        "env={'DATABASE': 'SECRET}ANOTHER', 'B': ''}",
        '{"env": {"DATABASE": "SECRET", "B": "ANOTHER"}, "x": 1}',
        r'{"env": {"DATABASE": "SECRET}\"}ANOTHER", "B": "C:\\", "D": "SECRET}ANOTHER"}}',
        r'"{\"env\": {\"DATABASE\": \"SECRET}ANOTHER\", \"B\": \"}SECRET\"}}"',
        "{'environment': {'DATABASE': 'SECRET ANOTHER'}}",
        '"env": [{"name": "DATABASE", "value": "SECRET]ANOTHER"}]',
        "env: ['DATABASE=SECRET', 'B=ANOTHER']",
        'Cluster(env=dict(DATABASE="SECRET)ANOTHER"))',
        'environment.DATABASE = "SECRET ANOTHER"',
        "env.'DATA BASE' = 'SECRET'\n  env . B = '''\nANOTHER\n'''",
        'options.environment.DATABASE="SECRET"',
        '[ environment ]\nDATABASE = "SECRET"\n  [other]',
        '[options."environment"]  # one\nDATABASE = """\n[SECRET]\nANOTHER"""\n[other]\n',
        "variables = { DATABASE = 'SECRET' }",
        '[variables]\nDATABASE = "SECRET"\n[other]',
        '{"variables": {"DATABASE": "SECRET"}}',
        "env DATABASE=SECRET B='ANOTHER SECRET' python -m one",
        "['env', 'DATABASE=SECRET', 'B=ANOTHER', 'python']",
        "env:\n  DATABASE: SECRET\n\n  B: |\n    ANOTHER",
        "a:\n  env:  # one\r\n  - name: DATABASE\r\n    value: SECRET\r\n  - ANOTHER=SECRET\r",
        '- "environment":\n    - DATABASE=SECRET\n    - "B=ANOTHER"',
    ],
)
def test_secrets_are_removed_whole(text: str) -> None:
    redacted = redaction.Redactor({}).text(f"{text}\nafter")
    assert "SECRET" not in redacted
    assert "ANOTHER" not in redacted
    assert redacted.endswith("after")
    assert redaction.Redactor({}).text(redacted) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "PWD=/data/images OLDPWD=/data/x",
        "loss=0.25, accuracy=0.5, step=3",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        f"/Users/ada/{'directory9/' * 8}file",
        "max_tokens=512 tokens: 3",
        "try:\n    x()\nexcept OSError:\n    pass\n",
        'File "one.py", line 3, in f\n    pass  # see: bypass: 3',
        "bypass: 3, compass=north, passes: 3, passed=True, Pass: ok",
        "pass: 12, fail: 3",
        "forward pass: 12 ms, first pass = 3, pass=2/3 ",
        "forward_pass: 12.5 ms backward_pass=7ms second_pass=True num_pass: 3",
        "{'pass': 3, 'fail': None}",
        "docker run -u 1000:1000 --user 1000:1000 one",
        "curl -u ada https://one:8080/x -o a:b",
        "risk-adjusted task-0123456789abcdefghijklmn disk-sk-learn",
        "sk-learn-experiments-of-several-years",
        "hf_hub_download hf_transfer_is_enabled_everywhere npm_config_cache_of_this_user",
        "xoxb- glpat-one SG.one.two global-batch-size-of-all-workers ya29.x",
        "--token-file /etc/one",
        "worker:0 failed: the cookie jar is empty",
        "config(password=[removed], name=one)",
        "Cluster(env={}, name=one)",
        '{"cluster": {"worker": ["h:1"]}, "environment": "cloud"}',
        "the environment: 3 variables, env python",
        "environment:\n  of the cloud\nenv:\nDATABASE: x\nenv: 3\n  a: 3",
        "[environments]\na = 1",
        "os.environ.get = 3",
        "the authorization failed, env=python(3)",
        "pip install -e . --environment x; grep -e x; Environment=production",
        "auth=(user, password) auth=None, auth: (failed), auth=('ada',) auth=get(config, 3)",
        "@requires_auth('read') HTTPBasicAuth(user, password) oauth('a', 'b') login('ada')",
        "use_auth = True, authors=('ada', 'eve'), the credentials (user, name) of 'one'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'; os.environ['API_TOKEN']",
        "config['max_tokens'] = 512; if config['password'] == other: x['keys'] = 'a'",
        "os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3') os.getenv('HOME', '/root')",
        "setattr(config, 'name', 'one') dict.setdefault('tokens', 'none')",
        "('token', 'label') ('mask_token', 'pad_token') ['password', 'user'] ('key', 'value')",
        '{"name": "rate", "value": "0.1"} {"key": "tokens", "value": 3}',
        "a cluster identified by 'worker:0'; each user is identified by 'name'",
        "set password; create user ada; the password 'is' invalid; a PASSWORD prompt",
        "set -x; set -e; setenv PATH /bin; setx PATH C; the token is missing; ENV PATH /bin",
        "docker run --name mongo -p 27017:27017 one; docker login one -u ada",
        "ssh login -p 2222; mongo --port 3; redis-cli -n 3 -a; unzip -p one.zip a",
        "ldapsearch -W -x; smbclient -U ada; echo done | tee log; echo 3 | sudo tee a",
        "kubectl create configmap one --from-file=a=b; 7z x -y one.7z; mysql -p -u ada",
    ],
)
def test_ordinary_text_is_kept(text: str) -> None:
    assert redaction.Redactor({}).text(text) == text


LONG = (
    "-",
    "--a-",
    "abc\n",
    ":/a:x",
    "token=",
    "cookie: ",
    "-eyj",
    "authorization ",
    "'Authorization': ",
    "env=f(",
    "env=f((",
    "env=f('a'(",
    "env=f('a' b)",
    "env=a|",
    "-e a",
    "-e 'a=",
    "--env=",
    "--env \n",
    "environment=a",
    "auth=('a','",
    "auth=('a' b)",
    "['a_token",
    "('password', ",
    "set -x ",
    "name: a_token ",
    "create user ",
    "set password ",
    "docker login ",
    "redis-cli -a 1",
    "echo ",
)


# A pattern that reads a text again for each part of it takes many minutes, which ends the test.
@pytest.mark.parametrize("text", LONG)
def test_long_text_is_read_once(text: str) -> None:
    text *= 500_000 // len(text)
    assert len(redaction.Redactor({}).text(text)) <= 2 * len(text)


def test_values_are_removed_by_their_names() -> None:
    values = {
        "env": {"DATABASE": "x"},
        "environment": {"DATABASE": "y"},
        "variables": {"DATABASE": "z"},
        "AccountKey": "z",
        "DB_PASS": "z",
        "pass": "z",
        "BYPASS": "z",
        "command": ["mysql", "--password", "hunter2", "-h", "db"],
        "docker": ["docker", "run", "-e", "A=hunter2", "--env", "B=hunter2", "one"],
        "pip": ["pip", "install", "-e", "."],
        "https://ada:hunter2@one": 1,
    }
    assert redaction.Redactor({}).value(values) == {
        "env": {"DATABASE": "[removed]"},
        "environment": {"DATABASE": "[removed]"},
        "variables": {"DATABASE": "[removed]"},
        "AccountKey": "[removed]",
        "DB_PASS": "[removed]",
        "pass": "[removed]",
        "BYPASS": "z",
        "command": ["mysql", "--password", "[removed]", "-h", "db"],
        "docker": ["docker", "run", "-e", "[removed]", "--env", "[removed]", "one"],
        "pip": ["pip", "install", "-e", "."],
        "https://[removed]@one": 1,
    }


def test_magic_writes_an_archive() -> None:
    shell = InteractiveShell()
    magics.load_ipython_extension(shell)
    try:
        launcher = Fake()
        cluster = tfd.Cluster(data_workers=1, launcher=launcher, name="images")
        shell.user_ns["mine"] = cluster
        launcher.task_hosts[0].set_state("data_worker:0", TaskState.FAILED, "it fell")
        for words in ("doctor", "doctor images", "doctor mine"):
            assert "TFD854" in shell.run_line_magic("tfd_cluster", words).codes
        assert shell.run_line_magic("tfd_cluster", "doctor localhost:1").codes == ("TFD809",)
        with pytest.raises(errors.UnknownName, match="imagse"):
            shell.run_line_magic("tfd_cluster", "doctor imagse")
    finally:
        magics.unload_ipython_extension(shell)
        shell.history_manager.end_session()
