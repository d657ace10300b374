"""Writes corpus.json: the texts on which ids are compared. Deterministic; run it again after changing the lists."""

import json
from pathlib import Path

PROSE = [
    "The quick brown fox jumps over the lazy dog.", "She sells sea shells by the sea shore.", "It's what they'd've wanted, isn't it?",
    "In 1998, 1,234,567.89 people paid $3.50 (or £2.75) each.", "Call +49 (0)221 123-4567 before 9:30 a.m.", "E = mc² and a² + b² = c²; ½ + ¼ = ¾.",
    "Die Straße führt über größere Brücken als früher.", "Übergrößenträger müssen draußen bleiben!", "Où est la bibliothèque, s'il vous plaît ?",
    "L'été dernier, j'ai mangé des crêpes à Nîmes.", "¿Dónde está el baño? ¡Mañana será otro día!", "O coração não envelhece, só a pele se enruga.",
    "Zażółć gęślą jaźń.", "Příliš žluťoučký kůň úpěl ďábelské ódy.", "Árvíztűrő tükörfúrógép.", "Ştiinţa şi învăţământul.", "Đây là một câu tiếng Việt có dấu.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.", "Її з'їли ґречні їжаки.", "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.", "Ἐν ἀρχῇ ἦν ὁ λόγος.",
    "敏捷的棕色狐狸跳过了懒狗。", "我们今天要去北京，明天再回上海。", "繁體中文：學習語言模型需要耐心。", "いろはにほへと ちりぬるを", "東京都は今日も晴れです。カタカナとひらがな。",
    "모든 국민은 법 앞에 평등하다.", "안녕하세요, 반갑습니다!", "สวัสดีครับ ยินดีที่ได้รู้จัก", "अनुच्छेद एक: सभी मनुष्य स्वतंत्र हैं।", "বাংলা ভাষা খুব সুন্দর।",
    "தமிழ் மொழி மிகவும் பழமையானது.", "ქართული ენა ძალიან ლამაზია.", "Հայերենը հին լեզու է։", "ብርሃን ይሁን አለ።", "ພາສາລາວ ສວຍງາມ", "ខ្ញុំចូលចិត្តភាសាខ្មែរ",
    "مرحبا بالعالم، كيف حالك اليوم؟", "اللُّغَةُ العَرَبِيَّةُ بِالتَّشْكِيلِ", "این یک جملهٔ فارسی است.", "שלום עולם, מה שלומך היום?", "בְּרֵאשִׁית בָּרָא אֱלֹהִים", "English وعربي mixed עם עברית text.",
]
EMOJI = [
    "😀😃😄", "👍🏽 ok", "👨‍👩‍👧‍👦 family", "🏳️‍🌈🏴‍☠️", "🇩🇪🇯🇵🇧🇷", "❤️‍🔥 vs ❤ vs ❤️", "🧑🏿‍💻 codes 👩🏻‍🔬", "1️⃣2️⃣#️⃣", "☀☁☂ ♠♥♦♣ ✓✗", "a😀b😀c", "🤦🏼‍♂️\u200d", "𝕳𝖊𝖑𝖑𝖔 𝒲ℴ𝓇𝓁𝒹 𝟘𝟙𝟚",
]
MARKS = [
    "e\u0301 is e\u0301, not é", "n\u0303 o\u0302 u\u0308 A\u030a", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘", "\u1112\u1161\u11ab\u1100\u1173\u11af", "ﬁ ﬂ ﬃ Ǆ ĳ", "Å Å Å", "½ ⅓ ① ⑳ Ⅷ ㎏ ℃", "ａｂｃ ＡＢＣ １２３",
    "\ufeffbom first", "zero\u200bwidth\u200cjoin\u200der\u2060", "soft\u00adhyphen", "left\u200eto\u200fright \u202aemb\u202c", "\u2028line\u2029paragraph", "nbsp\u00a0thin\u2009em\u2003ideographic\u3000end",
]
CODE = [
    "def f(x):\n    return x ** 2  # square\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n", "fn main() {\n    println!(\"{:?}\", vec![1, 2, 3]);\n}\n",
    "SELECT a.id, COUNT(*) FROM t AS a WHERE b LIKE '%x%' GROUP BY 1;", "<div class=\"a b\" id='c'>&nbsp;&lt;tag&gt;</div>", "{\"k\": [1, 2.5e-3, null, true], \"s\": \"\\u00e9\\n\"}",
    "#include <stdio.h>\nint main(void) { return 0; }", "const f = async (x) => { await g(`${x}`); };", "$ grep -rn 'foo\\|bar' . | sort | uniq -c", "\\begin{equation} \\int_0^\\infty e^{-x^2}\\,dx \\end{equation}",
    "public static void main(String[] args) { System.out.println(\"hi\"); }", "class A < B; def initialize(@x = nil) = super; end", "if [ -z \"$VAR\" ]; then echo >&2 'x'; fi", "x = lambda *a, **k: (a, k)\n\n\n    y = x(1)\n",
    "(defun fact (n) (if (<= n 1) 1 (* n (fact (- n 1)))))", "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"世界\")\n}\n", "| a | b |\n|---|:-:|\n| 1 | 2 |\n", "- [ ] task\n  - [x] done\n    * deep\n", "```rust\nlet x = 'a';\n```",
    "https://example.com/a/b?c=d&e=%20f#g", "user.name+tag@sub.example.co.uk", "C:\\Users\\me\\file.txt", "0xDEADBEEF 0b1010 0o755 1_000_000", "a->b::c.d?.e!.f", "!=== <=> ... :: ;; -> => |> ++ -- ** //", "<<<<<<< HEAD\n=======\n>>>>>>> main",
    "\tindented\twith\ttabs\t", "key: value\nlist:\n  - one\n  - two: 2\n", "%YAML 1.2\n---\n...", "Makefile:\n\tgcc -O2 -o $@ $<\n",
]
CONTROL = [
    "<|im_start|>user\nhi<|im_end|>", "Stop here.<|im_end|>", "Stop here. <|im_end|>\n", "text<|endoftext|>more", "<|endoftext|><|endoftext|>", "<think>hidden</think>", "a<think>b", "no</think>", "<tool_call>{}</tool_call>", "[gMASK]<sop><|user|>\nhello<|assistant|>", "/nothink", "please /nothink.", "x/nothinky",
    "<s>[INST] hi [/INST]</s>", "</s>", "<s>", "<unk>", " <s> ", "a</s>b", "<|system|>\n<|user|>\n<|observation|>", "<|im_start", "im_end|>", "< |im_end| >", "<|IM_END|>", "<<|im_end|>>", "<|im_end|", "|<|im_end|>|", "<|im_end|>.", ".<|im_end|>", "!<|im_end|>?", "(<think>)", "<think", "think>", "<|im_<|im_end|>end|>",
    "|||IP_ADDRESS|||", "write to |||EMAIL_ADDRESS||| now", "<0x41>", "<0x0A> literal", "\u2581", "a\u2581b", "\u2581\u2581x", "sčp", "a sčp b", "<mask> here", "a <mask> b", "<|fim_prefix|>x<|fim_suffix|>y", "<|end_of_text|>", "<eos><bos><pad>", "[PAD][CLS][SEP]", "<tool_response>\nr\n</tool_response>",
    "<|im_end|>\u00a0<|im_end|>", "<|im_end|>\n\n<|im_start|>assistant\n", "é<|im_end|>é", "世<|im_end|>界", "😀<|im_end|>😀", "   <|im_end|>   ", "\t<think>\t", "<|im_end|>    def f():", "1<|im_end|>2", "It's<|im_end|>'s", "\\u003c|im_end|\\u003e", "&lt;|im_end|&gt;",
]
ODD = [
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\r", "\u0000", "a\u0000b", "\u0001\u0002\u001f\u007f", "\u0080\u009f", "\ufffd", "a\ufffdb", "\\xff\\xfe", "\\u12", "%E4%B8", "\\", "\\\\n", "\u00ff\u00fe", "\ue000\uf8ff", "\U000f0000\U0010fffd", "\uffff\ufdd0", "Ĉċ Ġ Ċ č", "ÿþ", "â€™ mojibake", "Ã©",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft", "pneumonoultramicroscopicsilicovolcanoconiosis", "xX" * 60, "ha" * 40, "=" * 80, "-" * 79, ".,;:!?" * 12, "01" * 50, "ACGT" * 25, "🙂" * 20, "語" * 40, "\n" * 10, "\t" * 9, "'" * 7, "don't" * 5,
    "CamelCaseIdentifierName snake_case_identifier kebab-case-id SCREAMING_CASE", "iPhone15Pro MacBook2023 x86_64 ARMv8.2-A", "3.14159265358979323846", "1/2 3/4 10:30:45 2024-02-29", "IV XIV MCMXCIX", "€100 ¥2000 ₹50 ₿1", "a1b2c3 4d5e6f", "１２３ ٣٤٥ ४५६ ๑๒๓", "…—–‘’“”«»‹›„‚", "日本語とEnglishの混在です。", "Привет world 你好 안녕 שלום", "THE END", "the  double  blank", "tab\tand  blanks \n mixed", "ends with blank ", " starts with blank", "I'M YELLING, DON'T! WE'LL, THEY'RE, YOU'VE, HE'D",
]


def corpus():
    lines = PROSE + EMOJI + MARKS + CODE + CONTROL + ODD
    for blanks in list(range(1, 13)) + [16, 17, 20, 24, 25, 31, 32, 33, 48, 64]:
        lines.append(" " * blanks + "word")
        lines.append("a" + " " * blanks + "b")
        lines.append("end" + " " * blanks)
        lines.append("\n" + " " * blanks + "return x")
    for digits in range(1, 21):
        lines.append("1234567890123456789012345"[:digits])
        lines.append("n = -" + "9876543210987654321098765"[:digits] + ";")
    for newlines in range(2, 8):
        lines.append("a" + "\n" * newlines + "b")
        lines.append("a " + "\n " * newlines + "b")
        lines.append("\r\n" * newlines + "x")
    for left, right in zip(PROSE, reversed(CODE + PROSE)):
        lines.append(left + "\n\n" + right)
    for index, base in enumerate(PROSE):
        lines.append(base.upper() if index % 2 else base.lower())
        lines.append(base + CONTROL[index % len(CONTROL)])
        lines.append(CONTROL[(3 * index) % len(CONTROL)] + base[: 5 + index])
        lines.append(EMOJI[index % len(EMOJI)] + base[-7:] + MARKS[index % len(MARKS)][:4])
    for index, marker in enumerate(CONTROL):
        lines.append("Ja." + marker + "Nein")
        lines.append(marker + " " * (index % 5) + marker)
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    lines = corpus()
    path = Path(__file__).parent / "corpus.json"
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    print(len(lines), "texts")
