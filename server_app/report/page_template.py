"""The template of a run's page; a Python file, because Flower's bundle of an app carries no HTML."""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; margin: 0 auto; padding: 1rem; max-width: 60rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #d5dbe1; }
.figure { font-size: 2.2rem; font-weight: 600; color: #3566a8; margin: .25rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; border-bottom: 1px solid #eceff2; }
td.number, th.number { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: #5b6875; } dd { margin: 0; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; display: block; margin: .5rem 0 1.5rem; }
pre { background: #f4f6f8; padding: .6rem; overflow-x: auto; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; font-size: 11pt; } img, table, pre { break-inside: avoid; }
  pre { white-space: pre-wrap; } .wide { overflow: visible; } }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
{% if page.headline %}<p class="figure">{{ page.headline }}</p>
{% endif %}<dl>
{% for name, value in page.facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
{% if page.notes %}<h2>Warnings and notes</h2>
<ul>
{% for note in page.notes %}<li>{{ note }}</li>
{% endfor %}</ul>
{% endif %}{% for table in page.tables %}{% set texts = table.texts %}<h2>{{ table.heading }}</h2>
<div class="wide"><table>
<thead><tr>{% for column in table.columns %}<th{% if loop.index > texts %} class="number"{% endif %}>{{ column }}</th>\
{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr>{% for cell in row %}\
<td{% if loop.index > texts %} class="number"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endfor %}{% if page.plots %}<h2>Plots</h2>
{% for name, image in page.plots %}<img alt="{{ name }}" src="data:image/png;base64,{{ image }}">
{% endfor %}{% endif %}{% if page.code %}<h2>Load the result</h2>
<p>In a clone of this project, from the run's folder:</p>
<pre>{{ page.code }}</pre>
{% endif %}{% if page.commands %}<h2>Try next</h2>
<pre>{{ page.commands | join("\\n") }}</pre>
{% endif %}</body>
</html>
"""
