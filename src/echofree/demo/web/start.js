"use strict";
// Says so when the page can't work, in a script that runs where modules don't.
document.documentElement.dataset.theme = localStorage.getItem("echofree-theme") || "auto";
addEventListener("DOMContentLoaded", () => {
  const say = (text) => {
    const fault = document.getElementById("fault");
    fault.textContent = text;
    fault.hidden = false;
  };
  if (location.protocol === "file:") {
    say("Browsers don't run this page from a file. In its folder type: python -m http.server 8000, then open http://localhost:8000 · " +
      "浏览器不能从文件打开此页面。请在它的文件夹中输入 python -m http.server 8000，再打开 http://localhost:8000");
  } else if (typeof WebAssembly !== "object" || !("noModule" in HTMLScriptElement.prototype)) {
    say("This browser is too old: the page needs WebAssembly and script modules · 浏览器过旧：此页面需要 WebAssembly 与脚本模块");
  }
});
