"""The style sheet of all pages, light and dark.

Text has a contrast of at least 4.5:1 with its background; tests compute it from these colours.
"""

LIGHT = {
    "page": "#ffffff",
    "card": "#f3f5f7",
    "ink": "#1b1f24",
    "soft": "#535c66",
    "line": "#c9d0d7",
    "good": "#196c2e",
    "note": "#0757b8",
    "warning": "#7d5200",
    "bad": "#b91c26",
    "one": "#1f6bb5",
    "two": "#b4530a",
    "other": "#6b7480",
}
DARK = {
    "page": "#11151a",
    "card": "#1a2027",
    "ink": "#e8ecf1",
    "soft": "#a3adb8",
    "line": "#3a434d",
    "good": "#56c271",
    "note": "#6cb2ff",
    "warning": "#dfa937",
    "bad": "#ff7a72",
    "one": "#62abf0",
    "two": "#f09a55",
    "other": "#919ba7",
}
"""Name → colour. ``one`` and ``two`` are the series of a plot, such as candidate and baseline."""


def _colours(of: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in of.items())


STYLE = (
    f":root {{ color-scheme: light dark; {_colours(LIGHT)} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_colours(DARK)} }} }}\n"
    """
* { box-sizing: border-box; }
html { scroll-behavior: auto; -webkit-text-size-adjust: 100%; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; background: var(--page);
  color: var(--ink); overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; overflow-wrap: anywhere; }
p { max-width: 46rem; margin: .25rem 0 .75rem; overflow-wrap: anywhere; }
a { color: var(--note); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 3px solid var(--note); outline-offset: 2px; }
code, .mono { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.good-text { color: var(--good); } .note-text { color: var(--note); } .warning-text { color: var(--warning); }
.bad-text { color: var(--bad); }
.skip { position: absolute; left: -100vw; }
.skip:focus { position: static; }
.advice { border-left: .4rem solid var(--note); background: var(--card); padding: .6rem 1rem; margin: .5rem 0;
  max-width: 60rem; overflow-wrap: anywhere; }
.advice.good { border-color: var(--good); } .advice.warning { border-color: var(--warning); }
.advice.bad { border-color: var(--bad); } .advice.first { font-size: 1.1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); gap: 1rem; margin: 1rem 0; }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: .5rem; min-width: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; } figcaption .soft { font-weight: 400; font-size: .9rem; display: block; }
figure svg { width: 100%; height: auto; display: block; stroke-linejoin: round; stroke-linecap: butt; }
section.table { margin: 1.5rem 0; }
.scroll { overflow-x: auto; overflow-y: hidden; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  vertical-align: top; font-weight: 400; }
thead th { font-weight: 600; vertical-align: bottom; }
.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
.text:last-child:not(:first-child) { min-width: 16rem; }
@media (max-width: 45rem) { .text, .text:last-child:not(:first-child) { min-width: 13rem; } }
th.whole, td.whole { text-align: left; white-space: nowrap; }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
pre { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0; }
.pair { margin: 2rem 0; border-top: 1px solid var(--line); padding-top: .5rem; }
.prompt { background: var(--card); padding: .6rem 1rem; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
.side { padding: .6rem 1rem; border: 1px solid var(--line); border-radius: .5rem; min-width: 0; }
.side.won { border-color: var(--good); } .side.lost { border-color: var(--bad); }
.said { font-size: .9rem; font-weight: 600; }
"""
)
