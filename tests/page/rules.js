// What is wrong with the page for those who do not see it or use no mouse.
() => {
    const faults = [];
    const visible = (e) => e.checkVisibility({visibilityProperty: true});
    const named = (e) => {
        const by = (e.getAttribute("aria-labelledby") ?? "").split(/\s+/).filter(Boolean);
        const labels = [...(e.labels ?? [])].map((l) => l.textContent);
        labels.push(...by.map((id) => document.getElementById(id)?.textContent));
        const texts = [e.getAttribute("aria-label"), ...labels, e.textContent, e.title];
        return texts.some((text) => text?.trim());
    };
    const wanted = "button, a, input, textarea, select, canvas, dialog, [role]";
    for (const e of document.querySelectorAll(wanted)) {
        if (e.matches("[aria-hidden=true], [role=status], [role=alert]")) continue;
        if (visible(e) && !named(e)) faults.push(`no name: ${e.outerHTML.slice(0, 80)}`);
    }
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    if (ids.length !== new Set(ids).size) faults.push(`an id is there twice: ${ids}`);
    for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"]) {
        for (const e of document.querySelectorAll(`[${name}]`)) {
            for (const id of e.getAttribute(name).split(/\s+/)) {
                if (!document.getElementById(id)) faults.push(`${name} names no element: ${id}`);
            }
        }
    }
    if (document.querySelector("[tabindex]:not([tabindex='0'], [tabindex='-1'])")) {
        faults.push("tabindex > 0");
    }
    if (!document.documentElement.lang) faults.push("no language");
    const landmarks = [...document.querySelectorAll("main")].filter(visible).length;
    if (landmarks !== 1) faults.push(`${landmarks} main landmarks`);
    const headings = [...document.querySelectorAll("h1,h2,h3,h4,h5,h6")].filter(visible);
    if (headings.filter((e) => e.tagName === "H1").length !== 1) faults.push("not one h1");
    let level = 0;
    for (const e of headings) {
        const own = Number(e.tagName[1]);
        if (own > level + 1) faults.push(`heading level jumps to ${own}: ${e.textContent}`);
        level = own;
    }
    for (const e of document.querySelectorAll("button, a.pill, nav a, input, select")) {
        const box = e.getBoundingClientRect();
        const hidden = !visible(e) || e.closest(".sr, .skip") || e.type === "range";
        const small = box.width < 20 || box.height < 20;
        if (!hidden && small) faults.push(`too small: ${e.outerHTML.slice(0, 80)}`);
    }
    for (const e of document.querySelectorAll("[role=option]")) {
        if (!e.closest("[role=listbox]")) faults.push("option outside a listbox");
    }
    return faults;
}
