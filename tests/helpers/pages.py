"""Code of the documentation's pages, and what it says that it prints."""

import re


def blocks(page, *languages):
    """Number of the first line, and text, of each fenced block in one of these languages."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] in languages:
            yield text.count("\n", 0, match.start(2)), match[2]


def printed(code):
    """What the comments after print calls, on their line or on the next one, say is printed."""
    return re.findall(r"^print\(.*\)(?:  |\n)# (.*)$", code, re.MULTILINE)
