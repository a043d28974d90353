"""The status page in a real browser: headless Chromium."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.api.browser import Browser
from tests.api.conftest import running
from tests.api.fakenode import FakeNode
from tests.api.tieredhost import URL, TieredHost
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys

from kvstow_api.answers import OverviewView, TierView
from kvstow_api.client import Client, routes
from kvstow_api.openapi import EXAMPLES
from kvstow_service.cli.tables import POOLS, RANKS, SESSIONS, TIERS, Columns

pytestmark = pytest.mark.browser

NAME = f"kvstow {socket.gethostname()}"
LIVE = "document.getElementById('live').textContent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def test_changes_are_shown_without_reloading(browser: Browser, serve: Any, ranks: Any) -> None:
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    browser.evaluate("window.same = true")
    assert "all slots are pinned" in browser.text
    ranks.begin_store([b"\x00\x01"])
    ranks.engine.admin.drain("all", None)
    browser.until("document.getElementById('state').innerText.includes('draining')")
    browser.until(f"document.title === '{NAME}: draining'")
    browser.until("document.getElementById('pending').innerText.includes('4 KiB')")
    assert browser.evaluate("window.same")
    assert browser.complaints == []


def test_a_lost_connection_is_shown_in_page_and_title(browser: Browser, engine: Any, ranks: Any) -> None:
    with running(engine) as listeners:
        browser.open(listeners.url)
        browser.until(f"{LIVE} === 'live'")
    browser.until(f"{LIVE}.startsWith('no answer since')")
    assert browser.evaluate("document.title") == f"{NAME}: no answer"
    assert browser.evaluate("document.getElementById('live').getBoundingClientRect().top") < 100
    assert browser.evaluate("getComputedStyle(document.querySelector('main')).opacity") == "0.5"


def test_a_refused_page_shows_the_status(browser: Browser, serve: Any, ranks: Any) -> None:
    refused = "window.fetch = async () => new Response('', { status: 401 });"
    browser.ask("Page.addScriptToEvaluateOnNewDocument", source=refused)
    browser.open(serve().url)
    browser.until(f"{LIVE}.startsWith('refused (401) since')")
    assert browser.evaluate("document.title").endswith(": refused (401)")


def test_the_policy_blocks_foreign_scripts_and_styles(browser: Browser, serve: Any, ranks: Any) -> None:
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    browser.evaluate(
        "const added = document.createElement('script'); added.textContent = 'window.broken = true';"
        "document.body.append(added)"
    )
    browser.until("true")
    assert browser.evaluate("window.broken") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_without_scripts_the_page_says_what_shows_the_same(browser: Browser, serve: Any, ranks: Any) -> None:
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(serve().url)
    browser.until("document.body.innerText.includes('kvstow top shows the same')")


def focused(browser: Browser, presses: int) -> list[str]:
    """What has the focus after each press of Tab."""
    seen = []
    for _ in range(presses):
        browser.press_tab()
        seen.append(browser.evaluate("document.activeElement.textContent"))
        assert browser.evaluate("document.activeElement.getBoundingClientRect().left >= 0"), "it cannot be seen"
    return seen


_REACHABLE = "document.querySelectorAll('a[href], button, summary').length"


def test_every_link_and_button_is_reachable_by_keyboard(browser: Browser, serve: Any, ranks: Any) -> None:
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    seen = focused(browser, browser.evaluate(_REACHABLE))
    assert seen[0] == "Skip to the figures"
    assert {"1 min", "Values as a table", "readyz", "doctor", "overview", "metrics", "API"} <= set(seen)


def test_a_chart_has_its_values_as_a_table(browser: Browser, serve: Any, engine: Any, ranks: Any) -> None:
    browser.open(serve().url)
    browser.until("document.querySelectorAll('#charts canvas').length === 2")
    browser.evaluate("document.querySelector('#charts summary').click()")
    browser.until("document.querySelector('#charts .values tr')?.textContent === 'timehit ratio'")
    browser.until("document.querySelectorAll('#charts .values tr').length > 1")
    assert browser.evaluate("document.querySelector('.plot').getAttribute('aria-label')").startswith("Hit ratio: ")
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_colour_schemes(browser: Browser, serve: Any, ranks: Any, scheme: str) -> None:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    ranks.engine.admin.set_bypass(load=True, store=False, ttl_seconds=None)
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    back = browser.evaluate(_COLOUR.format(element="document.body", part="backgroundColor"))
    assert (luminance(back) > 0.5) == (scheme == "light")
    card = browser.evaluate(_COLOUR.format(element="document.querySelector('section')", part="backgroundColor"))
    for selector in ("h1", "h2", ".quiet", "td", ".conditions li", ".conditions b"):
        colour = browser.evaluate(_COLOUR.format(element=f"document.querySelector('{selector}')", part="color"))
        for behind in (back, card):
            assert contrast(colour, behind) >= 4.5, (selector, colour, behind)


def test_the_bar_has_the_colours_of_its_legend(browser: Browser, serve: Any, ranks: Any) -> None:
    ranks.report(pinned_slots=12, state="pinning")
    ranks.store([b"\x00\x01", b"\x00\x02", b"\x00\x03"])
    ranks.begin_store([b"\x00\x04"])
    ranks.lease([b"\x00\x01"])
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    colours = browser.evaluate(_BAR)
    assert set(colours) == {"cached", "filling", "free", "leased", "not-pinned"}
    assert all(bar == legend for bar, legend in colours.values()), colours
    assert len({bar for bar, _ in colours.values()}) == len(colours)


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_the_page_fits_narrow_windows(browser: Browser, serve: Any, ranks: Any, tmp_path: Path, width: int) -> None:
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    browser.screenshot(tmp_path / "page.png", width=width, height=900)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


# -- words ---------------------------------------------------------------------------------------------------------


NUMBERS = (None, 0, 7, 999, 1024, 1_500, 123_456, 65_011_712, 1_048_575_999, 5 << 40)
"""Counts and sizes on both sides of each unit."""
TIMES = (0.0, 0.0042, 0.9996, 12.6, 59.96, 60.0, 200.0, 3_599.6, 7_325.0, 90_061.0)
RATIOS = (None, 0.0, 0.00049, 0.1234, 0.6123, 0.9996, 1.0, 0.5, 0.25, 0.75)


def varied(overview: OverviewView) -> OverviewView:
    """An overview with a row for each of these values."""
    (pool, *_), (session, *_), (rank, *_) = overview.pools, overview.sessions, overview.ranks
    tier = msgspec.convert(EXAMPLES["TierView"], TierView)
    rows = list(enumerate(zip(NUMBERS, TIMES, RATIOS, strict=True)))
    return replace(
        overview,
        pools=[
            replace(
                pool,
                name=f"p{at}",
                granted_bytes=number or 0,
                usable_slots=1000,
                slots=replace(pool.slots, free=round(1000 * (ratio or 0.0))),
                pending=replace(pool.pending, loads=number or 0, stuck=at),
                now=replace(
                    pool.now,
                    hit_ratio=ratio,
                    load_bytes_per_second=number,
                    store_bytes_per_second=number and number / 3,
                    dropped_blocks_per_second=number and number / 7,
                    evicted_blocks_per_second=number,
                ),
            )
            for at, (number, _, ratio) in rows
        ],
        sessions=[
            replace(
                session,
                id=f"e{at}",
                host="" if number is None else "vm",
                pid=number,
                in_flight=at,
                oldest_seconds=seconds,
                leased_slots=number or 0,
                load_bytes_per_second=number,
                age_seconds=seconds,
            )
            for at, (number, seconds, _) in rows
        ],
        ranks=[
            replace(
                rank,
                rank=at,
                last_report_age_seconds=seconds,
                device="" if number is None else f"cuda:{at}",
                error_reason="memlock" if at % 2 else None,
                error="the limit is 8 MiB" if at % 3 else None,
            )
            for at, (number, seconds, _) in rows
        ],
        tier=replace(
            tier,
            items=[
                replace(
                    one,
                    namespace=f"n{at}",
                    counters=replace(
                        one.counters, read_blocks=number or 0, wait_seconds=seconds, saved_seconds=2 * seconds
                    ),
                )
                for one in tier.items[:1]
                for at, (number, seconds, _) in rows
            ],
        ),
    )


_TABLE = """[...document.querySelectorAll('#{id} table')[0].querySelectorAll('tbody tr:not(.group)')].map((row) =>
  Object.fromEntries([...row.children].map((cell, at) => [
    document.querySelectorAll('#{id} thead')[0].querySelectorAll('button')[at].textContent, cell.textContent])))"""


def test_page_and_command_line_say_the_same_of_every_value(browser: Browser, serve: Any) -> None:
    """The script of the page and `kvstow_api.texts` format values separately."""
    node = FakeNode(FakeClock(100.0))
    node.attach("a")
    with Client(serve(directory=node).url) as client:
        overview = varied(client.call(routes.get_overview))
        text = msgspec.json.encode(overview).decode()
        fake = f"window.fetch = async () => new Response({json.dumps(text)}, {{ status: 200 }});"
        browser.ask("Page.addScriptToEvaluateOnNewDocument", source=fake)
        browser.open(serve(directory=node).url)
    browser.until(f"{LIVE} === 'live'")
    shown: tuple[tuple[str, Columns[Any], Sequence[Any]], ...] = (
        ("pools", POOLS, overview.pools),
        ("sessions", SESSIONS, overview.sessions),
        ("ranks", RANKS, overview.ranks),
        ("tier", TIERS, overview.tier.items),
    )
    for part, columns, items in shown:
        rows = browser.evaluate(_TABLE.format(id=part))
        known = {column.title: column for column in columns.of("everywhere", "lists", "wide")}
        assert len(rows) == len(items)
        for row, item in zip(rows, items, strict=True):
            row.pop("pinned", None)  # has a bar in place of the share
            assert row == {title: known[title].text(item) for title in row}


# -- a node with pools ---------------------------------------------------------------------------------------------


@pytest.fixture
def node() -> FakeNode:
    """Two pools of two engines each; one engine is lost."""
    node = FakeNode(FakeClock(100.0))
    for name in (LONG_NAME, "b-000002"):
        node.attach(name).store([b"\x00\x01", b"\x00\x02"])
        node.attach(name)
    node.engines[1].begin_store([b"\x00\x03"])
    node.engines[1].control.lose("its connection has ended")
    return node


LONG_NAME = "deepseek-r1-distill-qwen-32b-instruct-awq-0a1b2c"


def test_a_click_on_a_pool_narrows_the_page_and_it_stays_live(browser: Browser, serve: Any, node: FakeNode) -> None:
    browser.open(serve(directory=node).url)
    browser.until(f"{LIVE} === 'live'")
    assert "s1" in browser.text
    browser.evaluate("document.querySelector('#pools tbody tr:last-of-type a').click()")
    browser.until("document.getElementById('sessions')?.innerText.includes('of pool b-000002')")
    browser.until(f"{LIVE} === 'live'")
    assert "s1" not in browser.text
    assert "s3" in browser.text
    node.engines[2].begin_store([b"\x00\x09"])
    browser.until("document.getElementById('pending').innerText.includes('4 KiB')")
    node.attach("b-000002")
    browser.until("document.getElementById('sessions').innerText.includes('s5')")
    browser.evaluate("document.querySelector('#pools h2 a').click()")
    browser.until("document.getElementById('sessions')?.innerText.includes('s1')")
    assert browser.complaints == []


def test_pools_are_reachable_by_keyboard(browser: Browser, serve: Any, node: FakeNode) -> None:
    browser.open(f"{serve(directory=node).url}/?pool=b-000002")
    browser.until(f"{LIVE} === 'live'")
    assert {"all pools", LONG_NAME, "b-000002"} <= set(focused(browser, browser.evaluate(_REACHABLE)))


def test_a_click_sorts_and_the_focus_stays(browser: Browser, serve: Any, node: FakeNode) -> None:
    browser.open(serve(directory=node).url)
    browser.until(f"{LIVE} === 'live'")
    first = "document.querySelector('#pools tbody th').textContent"
    button = "[...document.querySelectorAll('#pools thead button')].find((one) => one.textContent === 'pool')"
    assert browser.evaluate(first) == LONG_NAME
    for wanted, way in (("b-000002", "ascending"), (LONG_NAME, "descending"), (LONG_NAME, "none")):
        browser.evaluate(f"{button}.focus(), {button}.click()")
        assert (browser.evaluate(first), browser.evaluate(f"{button}.parentNode.ariaSort")) == (wanted, way)
        assert browser.evaluate("document.activeElement.textContent") == "pool"


def test_engines_are_grouped_by_pool_and_long_names_have_tooltips(browser: Browser, serve: Any, node: FakeNode) -> None:
    browser.open(serve(directory=node).url)
    browser.until(f"{LIVE} === 'live'")
    groups = "[...document.querySelectorAll('#sessions .group')].map((one) => one.textContent)"
    assert browser.evaluate(groups) == [f"{LONG_NAME} 2 engines", "b-000002 2 engines"]
    assert browser.evaluate("document.querySelector('#pools .name').title") == LONG_NAME


@pytest.mark.parametrize("hostile", ["<script>window.broken = 1</script>", '"><img src=x onerror="window.broken = 1">'])
def test_names_are_texts_and_never_html(browser: Browser, serve: Any, node: FakeNode, hostile: str) -> None:
    node.attach(hostile)
    browser.open(serve(directory=node, mode=hostile).url)
    browser.until(f"{LIVE} === 'live'")
    assert hostile in browser.text
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.scripts.length") == 1
    browser.evaluate("[...document.querySelectorAll('#pools tbody a')].at(-1).click()")
    browser.until("document.getElementById('sessions').innerText.includes('of pool')")
    assert browser.evaluate("window.broken") is None


def test_a_dead_service_leaves_the_rows_as_they_were(browser: Browser, engine: Any, node: FakeNode) -> None:
    with running(engine, directory=node) as listeners:
        browser.open(f"{listeners.url}/?pool=b-000002")
        browser.until(f"{LIVE} === 'live'")
    browser.until(f"{LIVE}.startsWith('no answer since')")
    assert "s3" in browser.text
    assert browser.evaluate("document.title") == f"{NAME}: no answer"


@pytest.mark.parametrize("width", [360, 800, 1040, 1600])
@pytest.mark.parametrize("query", ["", f"?pool={LONG_NAME}"])
def test_rows_fit_every_window(
    browser: Browser, serve: Any, node: FakeNode, tmp_path: Path, width: int, query: str
) -> None:
    for _ in range(60):
        node.attach("b-000002")
    browser.open(f"{serve(directory=node).url}/{query}")
    browser.until(f"{LIVE} === 'live'")
    browser.screenshot(tmp_path / "page.png", width=width, height=900)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    hidden = "[...document.querySelectorAll('.lines')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert browser.evaluate(hidden) == 0
    assert "kvstow detach s2 --kill" in browser.text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_rows_have_enough_contrast(browser: Browser, serve: Any, node: FakeNode, scheme: str) -> None:
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(f"{serve(directory=node).url}/?pool={LONG_NAME}")
    browser.until(f"{LIVE} === 'live'")
    card = browser.evaluate(_COLOUR.format(element="document.querySelector('section')", part="backgroundColor"))
    back = browser.evaluate(_COLOUR.format(element="document.querySelector('.selected th')", part="backgroundColor"))
    for selector in (".lines thead th", ".selected a", ".selected td", ".troubled th", "td.lost"):
        colour = browser.evaluate(_COLOUR.format(element=f"document.querySelector('{selector}')", part="color"))
        for behind in (back, card):
            assert contrast(colour, behind) >= 4.5, (selector, colour, behind)


_BAR = """Object.fromEntries([...document.querySelectorAll('#slots .bar i')].map((part) => {
  const name = part.className, swatch = document.querySelector('.legend .' + name);
  return [name, [getComputedStyle(part).backgroundColor, getComputedStyle(swatch, '::before').backgroundColor]];
}))"""
_COLOUR = "getComputedStyle({element}).{part}.match(/[\\d.]+/g).slice(0, 3).map(Number)"


def luminance(colour: list[float]) -> float:
    """As WCAG 2 defines it."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_store_below_the_pools_is_shown_and_changes(
    browser: Browser, serve: Any, engine: Any, ranks: Any, tiered_host: TieredHost
) -> None:
    browser.open(serve(directory=tiered_host.directory(16)).url)
    browser.until(f"{LIVE} === 'live'")
    section = "document.getElementById('tier')"
    assert browser.evaluate(f"getComputedStyle({section}).display") != "none"
    assert browser.evaluate(f"{section}.innerText.includes('{URL}')")
    number = tiered_host.begin()
    browser.until(f"{section}.querySelector('tbody td') !== null")
    assert browser.evaluate(f"{section}.querySelector('tbody td').innerText") == "on"
    tiered_host.change(number, state="down", reason="no answer in 0.5 s")
    browser.until("document.getElementById('state').innerText.includes('no answer in 0.5 s')")
    browser.until(f"{section}.querySelector('.troubled') !== null")
    width = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.evaluate(width), "the page scrolls sideways"
    assert browser.complaints == []


LOOP = [hashlib.sha256(bytes([number])).digest() for number in range(24)]
_SIZES = "document.getElementById('sizes')"


def test_hits_by_size_appear_with_the_evidence_and_mark_the_present_size(
    browser: Browser, serve: Any, engine: Any, ranks: Any, tmp_path: Path
) -> None:
    browser.open(serve().url)
    browser.until(f"{LIVE} === 'live'")
    assert "too early to tell" in browser.evaluate(f"{_SIZES}.innerText")
    engine.admin.set_policy("lru")
    for number in range(400):
        use_keys(engine, [LOOP[number % len(LOOP)]])
    engine.pool.tick()
    browser.until(f"{_SIZES}.querySelector('canvas') !== null")
    browser.evaluate(f"{_SIZES}.querySelector('summary').click()")
    browser.until(f"{_SIZES}.querySelectorAll('.values tr').length === 10")
    assert "0.0 % with 128 KiB" in browser.evaluate(f"{_SIZES}.querySelector('.plot').getAttribute('aria-label')")
    browser.until("document.getElementById('state').innerText.includes('twice the memory (256 KiB) would add')")
    for width in (360, 1040):
        browser.screenshot(tmp_path / "page.png", width=width, height=900)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []


def test_a_protected_page_asks_for_the_password_and_opens(
    browser: Browser, serve: Any, ranks: Any, tmp_path: Path
) -> None:
    """Its live part, too."""
    files = {"token_file": tmp_path / "admin", "viewer_token_file": tmp_path / "viewer"}
    for path in files.values():
        path.write_text(f"{path.name}-token")
        path.chmod(0o600)
    browser.log_in("viewer-token")
    browser.ask("Page.navigate", url=serve(**files).url)
    browser.until(f"document.title === '{NAME}: ready'")
    browser.until(f"{LIVE} === 'live'")
    assert browser.num_questions == 1
