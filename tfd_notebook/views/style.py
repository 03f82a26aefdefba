"""The style sheet of all HTML views. It sets no backgrounds, so it fits light and dark themes."""

from __future__ import annotations

# The class is doubled for a higher specificity than JupyterLab's rules for tables and lists.
_SHEET = """
.tfd-view{font-family:var(--jp-ui-font-family,system-ui,sans-serif);
font-size:var(--jp-ui-font-size1,13px);color:var(--jp-ui-font-color1,inherit);line-height:1.45;
max-width:100%}
.tfd-view .tfd-head{display:flex;flex-wrap:wrap;gap:.15em .8em;align-items:baseline}
.tfd-view .tfd-name{font-weight:600;max-width:24em;overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
.tfd-view .tfd-scroll{overflow-x:auto;margin:.45em 0;scrollbar-width:thin;
scrollbar-color:rgba(128,128,128,.6) transparent}
.tfd-view table{border-collapse:collapse;margin:0;font-size:inherit;color:inherit}
.tfd-view tbody tr{background:none}
.tfd-view th,.tfd-view td{padding:.12em .7em .12em 0;text-align:left!important;white-space:nowrap;
max-width:18em;overflow:hidden;text-overflow:ellipsis;border:0;line-height:1.45;
font-variant-numeric:tabular-nums;vertical-align:top}
.tfd-view th{font-weight:400;color:var(--jp-ui-font-color2,inherit);
border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.4))}
.tfd-view td.tfd-note{white-space:normal;min-width:9em;max-width:24em;overflow-wrap:anywhere}
.tfd-view .tfd-r{text-align:right!important}
.tfd-view svg{display:block;color:var(--jp-brand-color1,currentColor)}
.tfd-view .tfd-good{color:color-mix(in srgb,
var(--jp-success-color1,var(--vscode-charts-green,currentColor)) 60%,currentColor)}
.tfd-view .tfd-warn{color:color-mix(in srgb,
var(--jp-warn-color1,var(--vscode-charts-orange,currentColor)) 60%,currentColor)}
.tfd-view .tfd-bad{font-weight:600;color:color-mix(in srgb,
var(--jp-error-color1,var(--vscode-charts-red,currentColor)) 60%,currentColor)}
.tfd-view .tfd-quiet{color:var(--jp-ui-font-color2,inherit)}
.tfd-view .tfd-gpus{margin:.45em 0}
.tfd-view .tfd-gpuhost{display:flex;flex-wrap:wrap;gap:.15em .8em;margin:.2em 0;
align-items:flex-end}
.tfd-view .tfd-gpuname{flex:0 0 14em;max-width:100%;overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
.tfd-view .tfd-gputask{min-width:0;max-width:100%}
.tfd-view .tfd-gputask>div{display:flex;flex-wrap:wrap;gap:3px}
.tfd-view .tfd-gpu{display:flex;flex-wrap:wrap;justify-content:space-between;width:5.3em;
padding:0 3px 3px;gap:2px 0;border:1px solid var(--jp-border-color1,rgba(128,128,128,.6));
border-radius:2px;line-height:1.35}
.tfd-view .tfd-free .tfd-gpu{border-style:dashed}
.tfd-view .tfd-gpu>span:first-child{color:var(--jp-ui-font-color2,inherit)}
.tfd-view .tfd-gpu i{flex:0 0 auto;height:0;max-width:100%;margin-right:100%;
border-top:4px solid var(--jp-brand-color1,currentColor)}
.tfd-view .tfd-gpu i.tfd-idle{border-top-color:var(--jp-ui-font-color2,currentColor)}
.tfd-view .tfd-gpu i.tfd-busy{border-top-color:var(--jp-success-color1,currentColor)}
.tfd-view .tfd-gpu i.tfd-memory{border-top:3px double currentColor}
.tfd-view .tfd-gpu i.tfd-full{border-top-color:var(--jp-warn-color1,currentColor)}
.tfd-view .tfd-source{margin:.2em 0;padding:.3em .6em;max-height:18em;overflow:auto;
white-space:pre-wrap;overflow-wrap:anywhere;
border:1px solid var(--jp-border-color2,rgba(128,128,128,.4));
font-size:var(--jp-code-font-size,12px);line-height:1.35;color:inherit}
""".replace("\n", "").replace(".tfd-view", ".tfd-view.tfd-view")


def wrap(body: str) -> str:
    """Return `body` with the style sheet, in the element that the sheet applies to."""
    return f'<div class="tfd-view"><style>{_SHEET}</style>{body}</div>'
