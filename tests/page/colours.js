// Each visible text with its colour and its ground, as pixels.
() => {
    // Every colour through a canvas pixel, so that all notations become numbers.
    const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const paint = (colours) => {
        context.clearRect(0, 0, 1, 1);
        for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
        const element = node.parentElement;
        if (!node.data.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
        if (element.closest(".sr, .skip, :disabled, noscript, option, svg")) continue;
        const layers = [];
        for (let e = element; e; e = e.parentElement) {
            layers.unshift(getComputedStyle(e).backgroundColor);
        }
        const style = getComputedStyle(element);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        const text = node.data.trim().slice(0, 40);
        found.push([text, large, paint([...layers, style.color]), paint(layers)]);
    }
    return found;
}
