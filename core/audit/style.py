"""The style sheet of the report page. Light and dark by the reader's setting; prints well."""

CSS = """
:root{--bg:#faf9f6;--card:#fff;--ink:#1d2329;--soft:#5c6873;--rule:#e3e1da;--accent:#1f6f78;
--a:#1f6f78;--b:#c2702b;--c:#9aa5ad;--exact:#1b7f5c;--consistent:#6fb59a;--hypothesis:#d9a441;
--mismatch:#cf6a3c;--unverifiable:#9aa5ad;--rejected:#a8324a;--warn:#fdf4e3;--warnrule:#e0b64f}
@media(prefers-color-scheme:dark){
:root{--bg:#14181b;--card:#1b2125;--ink:#e6e9ea;--soft:#98a4ad;--rule:#2c343a;--accent:#63b7c0;
--a:#63b7c0;--b:#e29a5b;--c:#6b7780;--exact:#4fbf94;--consistent:#2f7f64;--hypothesis:#d9a441;
--mismatch:#e08257;--unverifiable:#6b7780;--rejected:#d8637b;--warn:#2b2517;--warnrule:#8a6d25}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1060px;margin:0 auto;padding:48px 24px 96px}
h1{font-size:30px;line-height:1.2;margin:4px 0 8px;font-weight:650;letter-spacing:-.01em;
overflow-wrap:break-word}h2{font-size:20px;margin:0 0 4px;font-weight:650}
h3{font-size:15px;margin:0 0 6px;font-weight:650}
.eyebrow{margin:0;color:var(--accent);font-weight:600;letter-spacing:.06em;
text-transform:uppercase;font-size:12px}.facts,.lede,small{color:var(--soft)}
.facts,.lede{margin:0}.lede{margin-bottom:18px;max-width:72ch}
section{margin-top:56px;padding-top:24px;border-top:1px solid var(--rule)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:16px;
margin-top:28px}
.tile,article{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:18px 20px}.tile p{margin:0;color:var(--soft)}
.tile b{display:block;font-size:30px;line-height:1.25;font-weight:650}
.pill{display:inline-block;vertical-align:middle;font-size:12px;font-weight:600;padding:2px 10px;
border-radius:99px;border:1px solid currentColor;color:var(--soft)}
.s-done,.d-keep{color:var(--exact)}
.s-failed,.s-tripped,.s-crashed,.d-regenerate{color:var(--rejected)}
.s-halted,.d-filter{color:var(--mismatch)}.d-mask{color:var(--hypothesis)}
.notes{margin-top:28px;background:var(--warn);border:1px solid var(--warnrule);border-radius:10px;
padding:16px 20px}.notes ul{margin:0;padding-left:20px}.plain{padding-left:20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:16px}
article p{margin:0 0 4px}.wide{overflow-x:auto;margin-top:16px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{color:var(--soft);font-weight:600;text-align:left;border-bottom:1px solid var(--rule);
white-space:nowrap}th,td{padding:6px 14px 6px 0;vertical-align:top}
td{border-bottom:1px solid var(--rule);overflow-wrap:break-word}tr:last-child td{border-bottom:0}
article th,article td{padding-right:10px}
.n{text-align:right;white-space:nowrap}tr.mark td{font-weight:650;color:var(--accent)}
svg{display:block;width:100%;max-width:860px;height:auto;margin-top:18px;overflow:visible}
svg text{fill:var(--ink);font-size:12.5px}svg .tick{fill:var(--soft);font-size:11px}
svg .num{fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke:var(--a);stroke-width:2;stroke-linejoin:round}
.area{fill:var(--a);opacity:.1}.whisker{stroke-width:2}
.c-a{fill:var(--a);stroke:var(--a);background:var(--a)}
.c-b{fill:var(--b);stroke:var(--b);background:var(--b)}
.c-c{fill:var(--c);stroke:var(--c);background:var(--c)}rect{stroke:none!important}
.v-exact{fill:var(--exact);background:var(--exact)}
.v-consistent{fill:var(--consistent);background:var(--consistent)}
.v-hypothesis{fill:var(--hypothesis);background:var(--hypothesis)}
.v-mismatch{fill:var(--mismatch);background:var(--mismatch)}
.v-unverifiable{fill:var(--unverifiable);background:var(--unverifiable)}
.v-rejected{fill:var(--rejected);background:var(--rejected)}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;margin:10px 0 0;color:var(--soft);
font-size:12.5px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
details{margin-top:16px}summary{cursor:pointer;color:var(--accent)}@media print{
body{background:#fff}main{padding:0}section{break-inside:avoid}}@media(max-width:560px){
.cards{grid-template-columns:1fr}}
"""
