"""A real JupyterLab and a page of a real Chromium for tests: open a notebook, run all its cells, read it.

The notebook model is asked rather than the page, because Lab keeps only cells near the screen in the page.
Steps wait for the app's own promises: waiting for an idle kernel alone is a race that often runs nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page
from support.checkout import Checkout

HARMLESS = re.compile(
    r"favicon|ResizeObserver loop|Failed to load resource: .*(404|403)|WebSocket connection.*closed"
)
TOKEN = "a-token-for-tests"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

STARTED = """async () => {
    await window.jupyterapp.restored;
}"""
OPEN = """path => {
    window.jupyterapp.commands.execute('docmanager:open', {path});
}"""
OPENED = """async path => {
    const app = window.jupyterapp;
    const deadline = Date.now() + 60000;
    const current = () => app.shell.currentWidget;
    while (!(current()?.context?.path === path && current().sessionContext) && Date.now() < deadline)
        await new Promise(resolve => setTimeout(resolve, 50));
    await current().context.ready;
    await current().sessionContext.ready;
    await current().sessionContext.session.kernel.info;
}"""
# Without the question whether to save: a page that is left asks none either.
CLOSE = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    await panel.sessionContext.shutdown();
    panel.dispose();
}"""
FRONT = """path => {
    const shell = window.jupyterapp.shell;
    shell.activateById(Array.from(shell.widgets('main')).find(one => one.context?.path === path).id);
}"""
RUN = """command => {
    window.ran = false;
    window.jupyterapp.commands.execute(command).finally(() => { window.ran = true; });
}"""
CELLS = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.model.cells;
    const found = [];
    for (const cell of cells) {
        if (cell.type !== 'code') continue;
        const json = cell.toJSON();
        found.push({source: cell.sharedModel.getSource(), count: cell.executionCount, outputs: json.outputs});
    }
    return found;
}"""
ASK = """async code => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    let text = '';
    const future = kernel.requestExecute({code, store_history: false});
    future.onIOPub = message => { text += message.content.data?.['text/plain'] ?? ''; };
    await future.done;
    return text;
}"""
SOURCES = """() => Array.from(
    window.jupyterapp.shell.currentWidget.content.model.cells, cell => cell.sharedModel.getSource()
)"""
# Ends when the figures of the cell are drawn.
SCROLL_TO = """async index => {
    const content = window.jupyterapp.shell.currentWidget.content;
    const {node, model} = content.widgets[index];
    const outputs = model.type === 'code' ? model.toJSON().outputs : [];
    const figures = outputs.filter(output => output.data?.['application/vnd.plotly.v1+json']).length;
    content.activeCellIndex = index;
    await content.scrollToItem(index, 'start');
    const deadline = Date.now() + 20000;
    do
        await new Promise(resolve => setTimeout(resolve, 50));
    while (node.querySelectorAll('.js-plotly-plot:has(.main-svg)').length < figures && Date.now() < deadline);
}"""
THEME = """async name => {
    await window.jupyterapp.commands.execute('apputils:change-theme', {theme: name});
    const light = String(!name.includes('Dark'));
    while (document.body.dataset.jpThemeLight !== light) await new Promise(done => setTimeout(done, 50));
    await new Promise(done => setTimeout(done, 300));
}"""
# WCAG contrast of every text of a figure or of our HTML now in the page, from the colours as rendered: the
# text's own, over the backgrounds that lie behind it, blended.
CONTRAST = """() => {
    const parse = text => {
        const parts = (text.match(/[\\d.]+/g) ?? []).map(Number);
        return parts.length < 3 ? null : [...parts.slice(0, 3), parts.length > 3 ? parts[3] : 1];
    };
    const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const light = colour => {
        const [r, g, b] = colour.map(value => {
            const part = value / 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const known = new Map();
    const behind = node => {
        if (!node) return [255, 255, 255, 1];
        if (!known.has(node)) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            const opaque = colour && colour[3] === 1;
            const below = opaque ? null : behind(node.parentElement);
            known.set(node, opaque ? colour : colour && colour[3] > 0 ? over(colour, below) : below);
        }
        return known.get(node);
    };
    const found = [];
    const figure = '.xtick text, .ytick text, .gtitle, .xtitle, .ytitle, .legendtext, .cbtitle text, ' +
        '.cbaxis text, .annotation-text';
    const html = '.jp-RenderedHTMLCommon span, .jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th, ' +
        '.jp-RenderedHTMLCommon p, .jp-OutputArea .widget-label, .jp-OutputArea .widget-html-content *';
    for (const [kind, nodes] of [['figure', figure], ['html', html]])
        for (const node of document.querySelectorAll(nodes)) {
            const box = node.getBoundingClientRect();
            const text = node.textContent.trim();
            if (!text || !box.width || !node.closest('.jp-OutputArea')) continue;
            const style = getComputedStyle(node);
            const colour = parse(kind === 'figure' ? style.fill : style.color);
            if (!colour || colour[3] === 0) continue;
            const below = behind(node);
            const [a, b] = [light(over(colour, below)), light(below)];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            found.push({kind, text: text.slice(0, 40), ratio, colour: colour.join(), below: below.join()});
        }
    return found;
}"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Lab:
    """A JupyterLab server started over a workspace as `make lab` does, whose settings live in a temporary
    folder.
    """

    def __init__(self, checkout: Checkout, home: Path, theme: str = "JupyterLab Light") -> None:
        self.port = free_port()
        settings = home / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True, exist_ok=True)
        (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
        environment = checkout.environment()
        environment.pop("GOMP_SPINCOUNT", None)  # which importing our package has set here
        for name, folder in (
            ("JUPYTER_CONFIG_DIR", "config"),
            ("JUPYTER_DATA_DIR", "data"),
            ("JUPYTER_RUNTIME_DIR", "runtime"),
            ("JUPYTERLAB_SETTINGS_DIR", "settings"),
            ("JUPYTERLAB_WORKSPACES_DIR", "workspaces"),
            ("IPYTHONDIR", "ipython"),
        ):
            environment[name] = str(home / folder)
        self.log = (home / "lab.log").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dflash_lab.cli", "lab", "--no-browser"),
                *(f"--port={self.port}", "--ServerApp.port_retries=0"),
                *(f"--IdentityProvider.token={TOKEN}", "--LabApp.expose_app_in_browser=True"),
                "--LabApp.extension_manager=readonly",
            ],
            cwd=checkout.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self._wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _wait(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended at once; see {self.log.name}")
            try:
                with urllib.request.urlopen(f"{self.url}/api?token={TOKEN}", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(f"JupyterLab did not answer; see {self.log.name}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class Window:
    """One page of Lab as its address opens it, with what the console complained about."""

    def __init__(self, browser: Browser, lab: Lab, *, width: int = 1280, height: int = 800) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.goto(f"{lab.url}/?token={TOKEN}", wait_until="domcontentloaded")
        self.page.wait_for_function("() => window.jupyterapp !== undefined", timeout=60_000)
        self.page.evaluate(STARTED)
        self.page.wait_for_selector(".jp-MarkdownViewer h2", timeout=60_000)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not HARMLESS.search(message.text):
            self.complaints.append(message.text)

    def first_page(self) -> Locator:
        """Bring Lab's first page to the front."""
        self.page.evaluate(FRONT, "runs/start.md")
        return self.page.locator(".jp-MarkdownViewer")


class Notebook:
    """A notebook in front in a window, opened by its link on the first page or by its path."""

    def __init__(self, window: Window, path: str, link: str = "") -> None:
        self.page, self.complaints = window.page, window.complaints
        self.complaints.clear()
        if link:
            window.first_page().get_by_role("link", name=link, exact=True).click()
        else:
            self.page.evaluate(OPEN, path)
        self.page.evaluate(OPENED, path)

    def run_all(self, timeout_s: float = 180) -> list[dict[str, Any]]:
        """Run all cells by Lab's own command; return them when each has its number. An error output fails."""
        self.page.evaluate(RUN, "notebook:run-all-cells")
        return self._ran(timeout_s)

    def restart_and_run_all(self, timeout_s: float = 180) -> list[dict[str, Any]]:
        """The same after `Restart Kernel and Run All Cells`, its question answered with yes."""
        self.page.evaluate(RUN, "notebook:restart-run-all")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        return self._ran(timeout_s)

    def _ran(self, timeout_s: float) -> list[dict[str, Any]]:
        self.page.wait_for_function("() => window.ran", timeout=timeout_s * 1000, polling=100)
        cells = self.cells()
        failed = [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
        assert not failed, f"{failed[0]['ename']}: {failed[0]['evalue']}"
        assert [cell["count"] for cell in cells] == list(range(1, len(cells) + 1))  # of a fresh kernel
        return cells

    def start(self) -> None:
        """Run all cells without waiting for them."""
        self.page.evaluate(RUN, "notebook:run-all-cells")

    def cells(self) -> list[dict[str, Any]]:
        return self.page.evaluate(CELLS)

    def ask(self, code: str) -> str:
        """Return the value of an expression in the notebook's kernel, as text."""
        return self.page.evaluate(ASK, code)

    def scroll_to(self, text: str) -> None:
        """Bring the cell whose source contains `text` to the top of the screen."""
        sources = self.page.evaluate(SOURCES)
        self.page.evaluate(SCROLL_TO, next(i for i, source in enumerate(sources) if text in source))
        if os.environ.get("SCREENSHOTS"):
            self.page.wait_for_timeout(800)

    def press(self, key: str, times: int, watched: Locator) -> None:
        """Press a key on the first slider in sight and wait until what `watched` says is another."""
        before = watched.inner_text()
        handle = self.page.locator(".widget-slider .noUi-handle:visible").first
        handle.focus()
        for _ in range(times):
            handle.press(key)
        deadline = time.monotonic() + 20
        while watched.inner_text() == before and time.monotonic() < deadline:
            self.page.wait_for_timeout(50)
        assert watched.inner_text() != before

    def theme(self, name: str) -> None:
        """Change the Lab's theme, for all pages of this server."""
        self.page.evaluate(THEME, name)

    def contrasts(self) -> list[dict[str, Any]]:
        """Contrast of every text of our outputs that is in the page now: kind, text, ratio, colours."""
        return self.page.evaluate(CONTRAST)

    def screenshot(self, name: str) -> None:
        """Keep a picture when SCREENSHOTS names a folder."""
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        """Shut the kernel down and close the notebook."""
        self.page.evaluate(CLOSE)


def write_parameters(source: Path, goal: Path, **values: Any) -> None:
    """Copy a notebook with values written into its parameters cell, as a person types them."""
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            for name, value in values.items():
                cell.source = re.sub(
                    rf"(?m)^({name}: \w+ = ).*?(  #|$)",
                    lambda m, value=value: f"{m[1]}{value!r}{m[2]}",
                    cell.source,
                )
    nbformat.write(notebook, goal)


def chromium() -> str:
    """The path of a Chromium, or an empty string."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
