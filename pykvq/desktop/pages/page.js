// keys, copying of code, and following an answer to its end while the reader is at the end of the page
const page = document.scrollingElement;
let follows = true, lastY = 0;
addEventListener("scroll", () => {
    if (innerHeight + scrollY > page.scrollHeight - 120) follows = true;
    else if (scrollY < lastY) follows = false;
    lastY = scrollY;
}, { passive: true });
const follow = () => { if (follows && document.querySelector("[data-chat]")) scrollTo(0, page.scrollHeight); };
new MutationObserver(follow).observe(document.body, { childList: true, subtree: true, characterData: true });
new ResizeObserver(follow).observe(document.body);
document.addEventListener("click", (event) => {
    const button = event.target.closest(".code-block button");
    if (!button) return;
    navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
const press = (name) => document.querySelector(`[data-key="${name}"]`)?.click();
document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector(".q-dialog")) press("stop");
    if (!(event.ctrlKey || event.metaKey) || !event.shiftKey) return;
    const key = event.key.toLowerCase();
    if (key === "o") { event.preventDefault(); press("new"); }
    if (key === "f") { event.preventDefault(); document.querySelector('[aria-label="Search chats"]')?.focus(); }
});
